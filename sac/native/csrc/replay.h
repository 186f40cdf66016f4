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

struct Program {
  PyObject_HEAD
  std::vector<Step>* steps;
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

inline PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject*) {  // a list of Steps of schedule.py
  PyObject* list = nullptr;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) return nullptr;
  auto* self = reinterpret_cast<Program*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->steps = new std::vector<Step>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    PyObject *outputs = nullptr, *fills = nullptr, *frees = nullptr;
    Step step{};
    if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "iOOO", &step.entry, &outputs, &fills, &frees) ||
        !read_pairs(outputs, step.outputs) || !read_pairs(fills, step.fills)) {
      Py_DECREF(self);
      return nullptr;
    }
    PyObject* values = PySequence_Fast(frees, "frees");
    for (Py_ssize_t k = 0; values != nullptr && k < PySequence_Fast_GET_SIZE(values); k++)
      step.frees.push_back(static_cast<int>(PyLong_AsLong(PySequence_Fast_GET_ITEM(values, k))));
    Py_XDECREF(values);
    if (PyErr_Occurred() != nullptr) {
      Py_DECREF(self);
      return nullptr;
    }
    self->steps->push_back(std::move(step));
  }
  return reinterpret_cast<PyObject*>(self);
}

inline void program_dealloc(Program* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->steps;
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
    const ParameterLeaf* leaf = parameter_of(t, static_cast<int>(PyLong_AsLong(number)));
    TensorImpl* impl = leaf != nullptr ? t.values[leaf->value].tensor : nullptr;
    const Tensor tensor = impl != nullptr ? lock(impl) : Tensor();
    bool is_same = tensor.defined() && storage_of(impl) != nullptr && tensor.sizes() == leaf->shape &&
                   (tensor.numel() == 0 || tensor.storage().nbytes() != 0);
    if (is_same) {
      PyObject *address = PyLong_FromVoidPtr(storage_of(impl)), *root = PyLong_FromLong(t.values[leaf->value].root);
      is_same = PyDict_Contains(args[3], address) == 0 && PyDict_Contains(args[4], root) == 0;
      Py_DECREF(address);
      Py_DECREF(root);
    }
    if (is_same)
      values[leaf->value] = tensor;
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

// Program, tape, values, and what Python does: `unusual(entry)` runs a step and returns whether communication is in
// flight, `wait()` waits for that, `set_states(entry)` puts the generators that an entry draws from where they were.
//
// Return the pairs of handles and tensors that the steps fill.
inline PyObject* run_program(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto& steps = *reinterpret_cast<Program*>(args[0])->steps;
  const Tables& t = *reinterpret_cast<Tape*>(args[1])->tables;
  auto& values = *reinterpret_cast<Values*>(args[2])->tensors;
  PyObject *unusual = args[3], *wait = args[4], *set_states = args[5];
  std::vector<std::pair<int, Tensor>> filled;
  bool in_flight = false;
  {
    pybind11::gil_scoped_release no_gil;
    Stack stack;
    for (const Step& step : steps) {
      const Entry& entry = t.entries.at(step.entry);
      if (entry.op == nullptr) {
        pybind11::gil_scoped_acquire gil;
        PyObject* answer = PyObject_CallFunction(unusual, "i", step.entry);
        in_flight = answer != nullptr && PyObject_IsTrue(answer) == 1;
        check(answer);
      } else {
        if (in_flight || entry.draws) {
          pybind11::gil_scoped_acquire gil;
          if (in_flight) check(PyObject_CallNoArgs(wait));
          if (entry.draws) check(PyObject_CallFunction(set_states, "i", step.entry));
          in_flight = false;
        }
        run_step(t, step, values, stack);
      }
      for (const Pair& fill : step.fills) filled.emplace_back(fill.first, values[fill.second]);
      for (const int value : step.frees) values[value].reset();
    }
  }
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(filled.size()));
  for (size_t i = 0; i < filled.size(); i++)
    PyList_SET_ITEM(found, static_cast<Py_ssize_t>(i),
                    Py_BuildValue("(iN)", filled[i].first, THPVariable_Wrap(filled[i].second)));
  return found;
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
