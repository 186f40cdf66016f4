// Runs the steps of a replay schedule: ordinary ones here, without the GIL, the others through Python.
#pragma once

#include "handles.h"
#include "record.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

namespace sac {

// The context in which a replay runs ops: below autograd, with grad enabled and without autocast.
struct Below {
  PyObject_HEAD
  struct Guards {
    c10::AutoGradMode grad{true};
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  };
  Guards* guards;
};

inline PyObject* below_enter(Below* self, PyObject*) {
  if (self->guards == nullptr) self->guards = new Below::Guards();
  return Py_NewRef(reinterpret_cast<PyObject*>(self));
}

inline PyObject* below_exit(Below* self, PyObject* const*, Py_ssize_t) {
  delete std::exchange(self->guards, nullptr);
  Py_RETURN_NONE;
}

inline void below_dealloc(Below* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->guards;
  type->tp_free(self);
  Py_DECREF(type);
}

// The values of one replay, by number; None where there is none.
struct Values {
  PyObject_HEAD
  std::vector<Tensor>* tensors;
};

inline PyObject* values_new(PyTypeObject* type, PyObject* args, PyObject*) {
  Py_ssize_t count = 0;
  if (!PyArg_ParseTuple(args, "n", &count)) return nullptr;
  auto* self = reinterpret_cast<Values*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->tensors = new std::vector<Tensor>(static_cast<size_t>(count));
  return reinterpret_cast<PyObject*>(self);
}

inline void values_dealloc(Values* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->tensors;
  type->tp_free(self);
  Py_DECREF(type);
}

inline Py_ssize_t values_length(PyObject* self) {
  return static_cast<Py_ssize_t>(reinterpret_cast<Values*>(self)->tensors->size());
}

inline PyObject* values_get(PyObject* self, Py_ssize_t index) {
  HANDLE_TH_ERRORS
  if (index < 0 || index >= values_length(self)) return PyErr_Format(PyExc_IndexError, "no such value");
  const Tensor& tensor = (*reinterpret_cast<Values*>(self)->tensors)[index];
  if (!tensor.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(tensor);
  END_HANDLE_TH_ERRORS
}

inline int values_set(PyObject* self, Py_ssize_t index, PyObject* value) {
  if (index < 0 || index >= values_length(self) || value == nullptr) {
    PyErr_SetString(PyExc_IndexError, "no such value");
    return -1;
  }
  auto& place = (*reinterpret_cast<Values*>(self)->tensors)[index];
  place = THPVariable_Check(value) ? THPVariable_Unpack(value) : Tensor();
  return 0;
}

struct Pair {
  int first, second;
};

struct Step {
  int entry;
  std::vector<Pair> outputs;  // index among the op's results, value
  std::vector<Pair> fills;    // handle, value
  std::vector<int> frees;
};

// What a replay needs of a schedule, the same for all calls with one tape layout.
struct Plan {
  std::vector<Step> steps;
  std::vector<Pair> fills;    // before the first step
  std::vector<int> kept;      // values that it starts from: kept ones,
  std::vector<int> leaves;    // and leaves
  std::vector<int> handles;   // that it fills, in order
};

struct Program {
  PyObject_HEAD
  Plan* plan;
};

inline bool read_pairs(PyObject* object, std::vector<Pair>& pairs) {
  PyObject* all = PySequence_Fast(object, "pairs");
  if (all == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all); i++) {
    Pair pair{};
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(all, i), "ii", &pair.first, &pair.second)) break;
    pairs.push_back(pair);
  }
  Py_DECREF(all);
  return PyErr_Occurred() == nullptr;
}

inline bool read_numbers(PyObject* object, std::vector<int>& numbers) {
  PyObject* all = PySequence_Fast(object, "numbers");
  for (Py_ssize_t i = 0; all != nullptr && i < PySequence_Fast_GET_SIZE(all); i++)
    numbers.push_back(static_cast<int>(PyLong_AsLong(PySequence_Fast_GET_ITEM(all, i))));
  Py_XDECREF(all);
  return PyErr_Occurred() == nullptr;
}

// The fields of a `ReplaySchedule`: steps (a list), fills, kept values, leaves; its handles in order.
inline PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *list = nullptr, *first_fills = nullptr, *kept = nullptr, *leaves = nullptr, *handles = nullptr;
  if (!PyArg_ParseTuple(args, "O!OOOO", &PyList_Type, &list, &first_fills, &kept, &leaves, &handles)) return nullptr;
  auto* self = reinterpret_cast<Program*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Plan& plan = *(self->plan = new Plan());
  if (!read_pairs(first_fills, plan.fills) || !read_numbers(kept, plan.kept) || !read_numbers(leaves, plan.leaves) ||
      !read_numbers(handles, plan.handles)) {
    Py_DECREF(self);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    PyObject *outputs = nullptr, *fills = nullptr, *frees = nullptr;
    Step step{};
    if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "iOOO", &step.entry, &outputs, &fills, &frees) ||
        !read_pairs(outputs, step.outputs) || !read_pairs(fills, step.fills) || !read_numbers(frees, step.frees)) {
      Py_DECREF(self);
      return nullptr;
    }
    plan.steps.push_back(std::move(step));
  }
  return reinterpret_cast<PyObject*>(self);
}

inline void program_dealloc(Program* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->plan;
  type->tp_free(self);
  Py_DECREF(type);
}

inline void push_again(Stack& stack, const Tables& t, const Entry& entry, const std::vector<Tensor>& values) {
  size_t argument = entry.arguments;
  int read = entry.reads;
  for (const Kind kind : entry.op->arguments) {
    const IValue& held = t.pool[argument++];
    switch (kind) {
      case Kind::PLAIN:
        stack.push_back(held);
        break;
      case Kind::TENSOR:
        if (held.isDevice())
          stack.emplace_back(values[t.reads[read++]]);
        else if (held.isScalar())
          stack.emplace_back(at::native::wrapped_scalar_tensor(held.toScalar()));
        else
          stack.push_back(held);
        break;
      case Kind::TENSORS: {
        if (held.isNone()) {
          stack.push_back(held);
          break;
        }
        c10::List<Tensor> list;
        for (int64_t i = 0; i < held.toInt(); i++) list.push_back(values[t.reads[read++]]);
        stack.emplace_back(std::move(list));
        break;
      }
      case Kind::OPTIONAL_TENSORS: {
        if (held.isNone()) {
          stack.push_back(held);
          break;
        }
        c10::List<std::optional<Tensor>> list;
        const int64_t length = held.toInt();
        for (int64_t i = 0; i < length; i++) {
          if (t.pool[argument++].toBool())
            list.push_back(values[t.reads[read++]]);
          else
            list.push_back(std::nullopt);
        }
        stack.emplace_back(std::move(list));
        break;
      }
    }
  }
}

inline void run_step(const Tables& t, const Step& step, std::vector<Tensor>& values, Stack& stack) {
  const Entry& entry = t.entries[step.entry];
  stack.clear();
  push_again(stack, t, entry, values);
  entry.op->handle.callBoxed(&stack);
  if (entry.op->returns_one_tensor) {
    if (!step.outputs.empty()) values[step.outputs[0].second] = std::move(stack[0]).toTensor();
    return;
  }
  std::vector<Tensor> results;
  for (const IValue& one : stack) {
    if (one.isTensor() && one.toTensor().defined()) results.push_back(one.toTensor());
    if (one.isTensorList())
      for (const Tensor& tensor : one.toTensorVector()) results.push_back(tensor);
  }
  for (const Pair& output : step.outputs) values[output.second] = results.at(output.first);
}

// The parameter that a leaf is, if it was met here and a replay may start from it as it is; undefined for others.
inline Tensor unchanged_parameter(const Tables& t, int value) {
  const ParameterLeaf* leaf = parameter_of(t, value);
  TensorImpl* impl = leaf != nullptr ? t.values[leaf->value].tensor : nullptr;
  Tensor tensor = impl != nullptr ? lock(impl) : Tensor();
  const bool is_same = tensor.defined() && storage_of(impl) != nullptr && tensor.sizes() == leaf->shape &&
                       (tensor.numel() == 0 || tensor.storage().nbytes() != 0);
  return is_same ? tensor : Tensor();
}

inline bool is_in(PyObject* table, PyObject* key) {  // steals the key
  Owned owned(checked(key));
  const int found = PyDict_Contains(table, key);
  if (found < 0) throw python_error();
  return found == 1;
}

// Values, tape, leaves, storages with copies (by address), roots with writers: put the parameters that were met here
// where a replay finds them; return the leaves of which Python has to say whether they are still what they were.
inline PyObject* load_parameters(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto& values = *reinterpret_cast<Values*>(args[0])->tensors;
  const Tables& t = *reinterpret_cast<Tape*>(args[1])->tables;
  PyObject* found = PyList_New(0);
  PyObject* all = PySequence_Fast(args[2], "leaves");
  for (Py_ssize_t i = 0; all != nullptr && i < PySequence_Fast_GET_SIZE(all); i++) {
    PyObject* number = PySequence_Fast_GET_ITEM(all, i);
    const auto value = static_cast<size_t>(PyLong_AsLong(number));
    const Tensor tensor = unchanged_parameter(t, static_cast<int>(value));
    if (tensor.defined() && !is_in(args[3], PyLong_FromVoidPtr(storage_of(tensor.unsafeGetTensorImpl()))) &&
        !is_in(args[4], PyLong_FromLong(t.values[value].root)))
      values[value] = tensor;
    else
      PyList_Append(found, number);
  }
  Py_XDECREF(all);
  return found;
  END_HANDLE_TH_ERRORS
}

// What the figures of calls with one tape layout depend on, and what such a call has to copy; see `_sizes_of` and
// `ReplayRecorder._release`. Kept values (number -> tensor), those of them that stay, handles that hold a value.
//
// Return two lists. The first has the bytes of each kept value's storage, and for each handle the first value in its
// storage if that value stays, else its own bytes, negated. The second has the handles in whose storage no value stays,
// but not those in a storage that one of them fills, of which nothing is to be copied (`compact`). None if a tensor is
// unusual.
inline PyObject* look_at_kept(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject *kept = args[0], *held = args[1], *handles = args[2];
  struct Place {
    unsigned long long storage;
    PyObject* value;  // borrowed from `kept`
    bool stays;
  };
  std::vector<Place> places;
  std::vector<Handle*> without_value;
  std::vector<unsigned long long> filled;
  Owned sizes(checked(PyList_New(0))), alone(checked(PyList_New(0)));
  const auto add = [](PyObject* list, PyObject* one) {
    Owned added(checked(one));
    if (PyList_Append(list, one) < 0) throw python_error();
  };
  PyObject *number = nullptr, *tensor = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(kept, &position, &number, &tensor)) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != THPVariableClass) Py_RETURN_NONE;
    StorageImpl* storage = storage_of(THPVariable_Unpack(tensor).unsafeGetTensorImpl());
    if (storage == nullptr || !is_plain(THPVariable_Unpack(tensor).unsafeGetTensorImpl())) Py_RETURN_NONE;
    const int stays = PyDict_Contains(held, number);
    if (stays < 0) return nullptr;
    places.push_back(Place{reinterpret_cast<unsigned long long>(storage), number, stays == 1});
    add(sizes.get(), PyLong_FromSize_t(storage->nbytes()));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); i++) {
    if (!PyObject_TypeCheck(PyList_GET_ITEM(handles, i), HandleType)) Py_RETURN_NONE;
    auto* handle = reinterpret_cast<Handle*>(PyList_GET_ITEM(handles, i));
    if (!is_tensor(handle->value) || !is_plain(THPVariable_Unpack(handle->value).unsafeGetTensorImpl())) Py_RETURN_NONE;
    const Place* first = nullptr;
    bool stays = false;
    for (const Place& one : places)
      if (one.storage == handle->storage) {
        first = first != nullptr ? first : &one;
        stays = stays || one.stays;
      }
    if (first == nullptr) Py_RETURN_NONE;
    if (first->stays)
      add(sizes.get(), Py_NewRef(first->value));
    else
      add(sizes.get(), PyLong_FromLongLong(-static_cast<long long>(THPVariable_Unpack(handle->value).nbytes())));
    if (stays) continue;
    const Tensor& held = THPVariable_Unpack(handle->value);
    without_value.push_back(handle);
    if (reinterpret_cast<PyObject*>(Py_TYPE(handle->value)) == THPVariableClass && held.nbytes() >= held.storage().nbytes())
      filled.push_back(handle->storage);
  }
  for (Handle* handle : without_value)
    if (std::find(filled.begin(), filled.end(), handle->storage) == filled.end())
      add(alone.get(), Py_NewRef(reinterpret_cast<PyObject*>(handle)));
  return PyTuple_Pack(2, sizes.get(), alone.get());
  END_HANDLE_TH_ERRORS
}

// See `ReplayRecorder.written_after_save`: the places of the handles, the tape, its writers, the missing handles.
inline PyObject* written_after_save(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto& places = *reinterpret_cast<Places*>(args[0]);
  const Tables& t = *reinterpret_cast<Tape*>(args[1])->tables;
  Owned found(checked(PyList_New(0)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[3]); i++) {
    PyObject* handle = PyList_GET_ITEM(args[3], i);
    const SavedAt* place = place_of(places, PyLong_AsSsize_t(handle));
    if (place == nullptr) {
      PyErr_SetObject(PyExc_KeyError, handle);
      return nullptr;
    }
    Owned root(checked(PyLong_FromLong(t.values[static_cast<size_t>(place->value)].root)));
    PyObject* entries = PyDict_GetItemWithError(args[2], root.get());
    if (PyErr_Occurred() != nullptr) return nullptr;
    if (entries == nullptr || PyList_GET_SIZE(entries) == 0) continue;
    const Py_ssize_t last = PyLong_AsSsize_t(PyList_GET_ITEM(entries, PyList_GET_SIZE(entries) - 1));
    if (last >= place->time && PyList_Append(found.get(), handle) < 0) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// What Python does in a replay, see `_PythonSteps`: `unusual(entry)` runs a step and returns whether communication is in
// flight, `wait()` waits for that, `set_states(entry)` puts the generators that an entry draws from where they were.
inline PyObject* call_python(PyObject* steps, const char* name, int entry) {
  return PyObject_CallMethod(steps, name, "i", entry);
}

using Filled = std::vector<std::pair<int, Tensor>>;

// Run the steps, without the GIL where they are not Python's; add the handles and tensors that they fill. Return whether
// communication is still in flight.
inline bool run_steps(const Plan& plan, const Tables& t, std::vector<Tensor>& values, PyObject* python, Filled& filled) {
  bool in_flight = false;
  pybind11::gil_scoped_release no_gil;
  Stack stack;
  for (const Step& step : plan.steps) {
    const Entry& entry = t.entries.at(step.entry);
    if (entry.op == nullptr) {
      pybind11::gil_scoped_acquire gil;
      PyObject* answer = call_python(python, "unusual", step.entry);
      in_flight = answer != nullptr && PyObject_IsTrue(answer) == 1;
      check(answer);
    } else {
      if (in_flight || entry.draws) {
        pybind11::gil_scoped_acquire gil;
        if (in_flight) check(PyObject_CallMethod(python, "wait", nullptr));
        if (entry.draws) check(call_python(python, "set_states", step.entry));
        in_flight = false;
      }
      run_step(t, step, values, stack);
    }
    for (const Pair& fill : step.fills) filled.emplace_back(fill.first, values[fill.second]);
    for (const int value : step.frees) values[value].reset();
  }
  return in_flight;
}

inline PyObject* pairs_for_python(const Filled& filled) {
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(filled.size()));
  for (size_t i = 0; i < filled.size(); i++)
    PyList_SET_ITEM(found, static_cast<Py_ssize_t>(i),
                    Py_BuildValue("(iN)", filled[i].first, THPVariable_Wrap(filled[i].second)));
  return found;
}

// Program, tape, values, a `_PythonSteps`. Returns the pairs of handles and tensors that the steps fill.
inline PyObject* run_program(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Filled filled;
  run_steps(*reinterpret_cast<Program*>(args[0])->plan, *reinterpret_cast<Tape*>(args[1])->tables,
            *reinterpret_cast<Values*>(args[2])->tensors, args[3], filled);
  return pairs_for_python(filled);
  END_HANDLE_TH_ERRORS
}

// Whether the handles that wait in a graph task are those that a program fills.
inline bool fills_what_waits(const Plan& plan, const Handles& handles, Py_ssize_t task) {
  size_t next = 0;
  for (const Handle* handle : *handles.list) {
    if (handle == nullptr || !waits(handle, task)) continue;
    if (next == plan.handles.size() || plan.handles[next] != handle->index) return false;
    next++;
  }
  return next == plan.handles.size();
}

inline bool is_in(PyObject* table, int key) { return is_in(table, PyLong_FromLong(key)); }

inline Owned attribute(PyObject* object, const char* name) { return Owned(checked(PyObject_GetAttrString(object, name))); }

// A tensor that needs no look from Python, and has data.
inline bool is_plain_object(PyObject* object) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) return false;
  const Tensor& tensor = THPVariable_Unpack(object);
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return is_plain(impl) && impl->layout() == at::kStrided && storage_of(impl) != nullptr &&
         impl->version_counter().enabled() && (tensor.numel() == 0 || tensor.storage().nbytes() != 0);
}

inline bool has_shape(const Tensor& tensor, PyObject* shape) {
  if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != tensor.dim()) return false;
  for (int64_t i = 0; i < tensor.dim(); i++)
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i)) != tensor.size(i)) return false;
  return true;
}

// Do what `leaf_as_then` does for a plain tensor that is an input, or from outside the region; undefined if Python has
// to find out what to do. `leaves`: value -> `Leaf`, `inputs`: position -> tensor. No op writes to the leaf.
inline Tensor plain_leaf(PyObject* leaves, PyObject* inputs, PyObject* value) {
  PyObject* leaf = PyDict_GetItemWithError(leaves, value);
  if (leaf == nullptr) {
    if (PyErr_Occurred() != nullptr) throw python_error();
    return {};
  }
  Owned position = attribute(leaf, "position");
  if (PyLong_AsLong(position.get()) >= 0) {
    PyObject* input = PyDict_GetItemWithError(inputs, position.get());
    if (input == nullptr && PyErr_Occurred() != nullptr) throw python_error();
    if (input == nullptr || !is_plain_object(input)) return {};
    TensorImpl* impl = THPVariable_Unpack(input).unsafeGetTensorImpl();
    torch::torch_dispatch_mode::StashTorchDispatchStackGuard no_modes;
    return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
  }
  Owned get = attribute(leaf, "tensor"), found(checked(PyObject_CallNoArgs(get.get())));
  if (!is_plain_object(found.get())) return {};
  const Tensor& tensor = THPVariable_Unpack(found.get());
  const bool is_persistent = attribute(leaf, "is_persistent").get() == Py_True;
  const auto version = PyLong_AsLongLong(attribute(leaf, "version").get());
  const bool is_same = is_persistent || version == tensor.unsafeGetTensorImpl()->version_counter().current_version();
  return is_same && has_shape(tensor, attribute(leaf, "shape").get()) ? tensor : Tensor();
}

// Of the leaves that a replay reads (a list), those at which Python has to look when the forward ends, see
// `ReplayRecorder._check_leaves`: not inputs, nor plain tensors that are there and too large to be copied. The tape,
// `leaves` as for `plain_leaf`, the bytes of the largest storage that is copied.
inline PyObject* leaves_to_look_at(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const Tables& t = *reinterpret_cast<Tape*>(args[0])->tables;
  const size_t most = PyLong_AsSize_t(args[3]);
  Owned found(checked(PyList_New(0)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[2]); i++) {
    PyObject* value = PyList_GET_ITEM(args[2], i);
    const int number = static_cast<int>(PyLong_AsLong(value));
    if (is_living_parameter(t, number)) continue;
    PyObject* leaf = parameter_of(t, number) == nullptr ? PyDict_GetItemWithError(args[1], value) : nullptr;
    if (PyErr_Occurred() != nullptr) return nullptr;
    if (leaf != nullptr) {
      Owned position = attribute(leaf, "position");
      if (PyLong_AsLong(position.get()) >= 0) continue;
      Owned get = attribute(leaf, "tensor"), tensor(checked(PyObject_CallNoArgs(get.get())));
      if (is_plain_object(tensor.get()) && THPVariable_Unpack(tensor.get()).storage().nbytes() > most) continue;
    }
    if (PyList_Append(found.get(), value) < 0) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// Whether what the handles get is, by its checksums, what autograd saved in the forward; false if Python has to compare.
inline bool are_as_saved(const Filled& filled, PyObject* object, bool in_order) {
  if (object == Py_None) return true;
  const auto& sums = *reinterpret_cast<Checksums*>(object);
  for (const auto& [handle, tensor] : filled) {
    const int64_t then = sum_of(sums, handle);
    if (then < 0 || then != checksum_of(tensor, in_order)) return false;
  }
  return true;
}

// `Program.replay`: tape, handles, graph task, kept values (number -> tensor), roots with writers, leaves, inputs (both
// as for `plain_leaf`), checksums by handle or None, whether strides may differ, a `_PythonSteps`, values. Does all of a
// replay at once, and fills the handles. Returns None, before anything runs, if other handles wait, if a kept value is
// not held as a plain tensor, or if `load` of `_PythonSteps`, which is asked for leaves that are not plain tensors, has
// returned None: Python finds out what to do. Returns the pairs of handles and tensors if Python has to look at them.
inline PyObject* program_replay(Program* self, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 11)) return nullptr;
  const Plan& plan = *self->plan;
  const Tables& t = *reinterpret_cast<Tape*>(args[0])->tables;
  auto& handles = *reinterpret_cast<Handles*>(args[1]);
  PyObject *kept = args[3], *writers = args[4], *leaves = args[5], *inputs = args[6], *sums = args[7], *python = args[9];
  auto& values = *reinterpret_cast<Values*>(args[10])->tensors;
  if (!fills_what_waits(plan, handles, PyLong_AsSsize_t(args[2]))) Py_RETURN_NONE;
  for (const int value : plan.kept) {
    Owned number(checked(PyLong_FromLong(value)));
    Owned held(Py_XNewRef(PyDict_GetItem(kept, number.get())));
    if (held && !THPVariable_Check(held.get())) held = checked(PyObject_GetAttrString(held, "value"));  // a SavedResult
    if (!held || reinterpret_cast<PyObject*>(Py_TYPE(held.get())) != THPVariableClass) Py_RETURN_NONE;
    values.at(value) = THPVariable_Unpack(held.get());
  }
  const Below::Guards below;
  for (const int value : plan.leaves) {
    Owned number(checked(PyLong_FromLong(value)));
    if (!is_in(writers, t.values.at(value).root)) {
      values.at(value) = unchanged_parameter(t, value);
      if (!values[value].defined()) values[value] = plain_leaf(leaves, inputs, number.get());
      if (values[value].defined()) continue;
    }
    Owned loaded(checked(PyObject_CallMethod(python, "load", "O", number.get())));
    if (loaded.get() == Py_None) Py_RETURN_NONE;
    values.at(value) = tensor_from(loaded.get());
  }
  Filled filled;
  for (const Pair& fill : plan.fills) filled.emplace_back(fill.first, values.at(fill.second));
  const bool in_flight = run_steps(plan, t, values, python, filled);
  if (in_flight || !are_as_saved(filled, sums, args[8] == Py_True)) return pairs_for_python(filled);
  for (const auto& [index, tensor] : filled) {
    Owned value(checked(THPVariable_Wrap(tensor)));
    if (Handle* handle = handles.list->at(index)) Py_XSETREF(handle->value, value.release());
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// `Handles.fill`: pairs of a handle's index and the tensor that it gets, unless autograd has dropped it.
inline PyObject* handles_fill(Handles* self, PyObject* pairs) {
  HANDLE_TH_ERRORS
  for (Py_ssize_t i = 0; i < PyList_Size(pairs); i++) {
    PyObject* pair = PyList_GET_ITEM(pairs, i);
    const auto index = static_cast<size_t>(PyLong_AsSsize_t(PyTuple_GetItem(pair, 0)));
    if (PyErr_Occurred() != nullptr) return nullptr;
    Handle* handle = self->list->at(index);
    if (handle != nullptr) Py_XSETREF(handle->value, Py_NewRef(PyTuple_GET_ITEM(pair, 1)));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
