// Records ordinary ops: those that read tensors, return new tensors, and have no trait that Python has to handle.
#pragma once

#include "checksum.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

namespace sac {

// A mode's part that the library reads. The thread on whose stack the mode is reads `sites` without the GIL.
struct Mode {
  PyObject_HEAD
  PyObject* sites;     // the call sites of the module that runs, by id of the op
  PyObject* path;      // of this module
  PyObject* sites_at;  // the call sites of each path, once the mode listens
  PyObject* weakrefs;
};

inline thread_local Tape* recording = nullptr;  // of the innermost native mode on this thread's stack

inline Tape* tape_of(PyObject* mode) {
  for (Tape* tape = recording; tape != nullptr; tape = tape->outer)
    if (tape->mode == mode) return tape;
  return nullptr;
}

struct Ids;
inline Ids* ids_of(PyObject* mode);  // see rerun.h

inline Site* site_of(Tape& tape, const OperatorHandle& op) {
  PyObject* path = reinterpret_cast<Mode*>(tape.mode)->sites;
  if (path != tape.path) {
    tape.path = path;
    tape.path_sites = tape.sites->at(path);
  }
  if (tape.path_sites == nullptr) {
    tape.path_sites = tape.sites->at(path);
    if (tape.path_sites == nullptr) return nullptr;
  }
  return tape.sites->find(tape.path_sites, &op.schema());
}

inline void check(PyObject* answer) {
  if (answer == nullptr) throw python_error();
  Py_DECREF(answer);
}

// Ask Python for the number of a tensor that the tape does not know; -1 if the op has to go to Python.
inline int ask_number(Tape& tape, const Tensor& tensor, const Site& site) {
  Gil gil;
  PyObject* wrapped = THPVariable_Wrap(tensor);
  PyObject* op = PyObject_GetAttrString(site.object, "op");
  PyObject* found = PyObject_CallMethod(tape.owner, "find", "OO", wrapped, op);
  Py_XDECREF(op);
  Py_XDECREF(wrapped);
  if (found == nullptr) throw python_error();
  const long number = PyLong_AsLong(found);
  Py_DECREF(found);
  return tape.needs_attention ? -1 : static_cast<int>(number);
}

// Do what `Tape.register_unknown` does for a plain tensor in a storage that the tape does not know; -1 if Python has to
// find out how the tensor was made.
inline int add_external(Tape& tape, const Tensor& tensor) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  StorageImpl* storage = storage_of(impl);
  PyObject* object = object_of(impl);
  if (storage == nullptr || impl->layout() != at::kStrided || tensor.requires_grad()) return -1;
  if (object != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) return -1;
  Tables& t = *tape.tables;
  sync(tape);
  if (t.roots.find(storage) != t.roots.end()) return -1;
  const uint32_t version = impl->version_counter().current_version();
  const int value = add_value(t, impl, -1, version, true);
  record_storage(t, storage, value);
  Gil gil;
  check(PyObject_CallMethod(tape.owner, "add_external", "NiI", THPVariable_Wrap(tensor), value, version));
  return value;
}

// Do what `Tape._register_parameter` does; Python's tables learn of it when they are read.
inline int add_parameter(Tape& tape, TensorImpl* impl) {
  Tables& t = *tape.tables;
  const uint32_t version = impl->version_counter().current_version();
  StorageImpl* storage = storage_of(impl);
  const auto found = storage != nullptr ? t.roots.find(storage) : t.roots.end();
  const int value = add_value(t, impl, found == t.roots.end() ? -1 : found->second, version, true);
  t.unsynced.push_back(value);
  t.parameters.push_back(ParameterLeaf{value, version, impl->sizes().vec(), false});
  return value;
}

inline bool is_parameter(const TensorImpl* tensor) {  // itself, not an instance of a subclass
  PyObject* object = object_of(tensor);
  return object != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass;
}

inline PyObject* item(PyObject* table, long key) {  // borrowed, or nullptr; with the GIL
  Owned number(checked(PyLong_FromLong(key)));
  PyObject* found = PyDict_GetItemWithError(table, number.get());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw python_error();
  return found;
}

inline bool has(PyObject* set, PyObject* key) {  // a set or a dictionary; with the GIL
  const int found = PyDict_Check(set) ? PyDict_Contains(set, key) : PySet_Contains(set, key);
  if (found < 0) throw python_error();
  return found != 0;
}

inline bool has(PyObject* set, long key) { return has(set, Owned(checked(PyLong_FromLong(key))).get()); }

inline void put(PyObject* table, long key, PyObject* value) {  // steals the value; with the GIL
  PyObject* number = PyLong_FromLong(key);
  const bool done = value != nullptr && PyDict_SetItem(table, number, value) == 0;
  Py_DECREF(number);
  Py_XDECREF(value);
  if (!done) throw python_error();
}

// Do what `Tape.look_at_version` does where the ops that were recorded explain the version of a value; return false if
// they do not: something unseen has written to it.
inline bool accept_version(Tape& tape, int value, uint32_t version) {
  Gil gil;
  Tables& t = *tape.tables;
  PyObject* seen_at = item(tape.seen_at, value);
  const long seen = seen_at != nullptr ? PyLong_AsLong(seen_at) : -1;
  PyObject* writers = item(tape.writers, t.values[value].root);
  int64_t writes = 0;
  for (Py_ssize_t i = writers != nullptr ? PyList_GET_SIZE(writers) : 0; i-- > 0;)
    writes += PyLong_AsLong(PyList_GET_ITEM(writers, i)) >= seen ? 1 : 0;
  if (int64_t{version} - int64_t{t.values[value].version} > writes) return false;
  t.values[value].version = version;
  put(tape.seen_at, value, PyLong_FromSize_t(t.entries.size()));
  return true;
}

// Whether a tensor holds what the tape has recorded for its number.
inline bool is_current(Tape& tape, const TensorImpl* tensor, int value) {
  const Value& known = tape.tables->values[value];
  const uint32_t version = tensor->version_counter().current_version();
  if (version != known.version) return accept_version(tape, value, version);
  return !has_moved(known, tensor);
}

// Do what `TapeRecorder._explain` does for a factory's result that is still the constant that the factory makes; return
// false, with nothing done, if Python has to look at it.
inline bool explain(Tape& tape, const Factory factory, const Tensor& tensor) {
  Tables& t = *tape.tables;
  const Entry& entry = t.entries[factory.entry];
  if (factory.is_uninitialised || entry.op == nullptr || tape.depth != 1) return false;  // other modes see what runs here
  const int root = factory.root;
  const Tensor whole = t.ids.find(tensor.unsafeGetTensorImpl())->second == root ? tensor : lock(t.values[root].tensor);
  if (!whole.defined() || !whole.is_cpu() || !is_plain(whole.unsafeGetTensorImpl())) return false;
  if (whole.layout() != at::kStrided || whole.is_quantized() || whole._is_zerotensor()) return false;
  const Op& op = *entry.op;
  if (!op.returns_one_tensor) return false;
  Stack stack;
  for (size_t i = 0; i < op.arguments.size(); i++) {
    const IValue& held = t.pool[entry.arguments + i];
    if (op.arguments[i] != Kind::PLAIN && !(op.arguments[i] == Kind::TENSOR && held.isDevice())) return false;
    stack.push_back(op.arguments[i] == Kind::PLAIN ? held : IValue(whole));
  }
  op.handle.callBoxed(&stack);
  if (!at::equal(stack[0].toTensor(), whole)) return false;
  remove_factory(t, root);
  return true;
}

// Whether an op may read what a factory has made and no op has written to; see `TapeRecorder.read_factories`.
inline bool may_read_factory(Tape& tape, const Factory& factory, const Tensor& tensor, const Site& site, bool is_written) {
  if (site.memory != Memory::NEW || (site.on_tape & FILLS) != 0) return true;
  if (is_written && (site.on_tape & FILLS_PARTS) != 0 && factory.is_uninitialised) return true;
  return explain(tape, factory, tensor);
}

// The number of a tensor that an op reads, or -1 if Python has to look at it.
inline int read(Tape& tape, const Tensor& tensor, const Site& site, bool is_written) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!is_plain(impl)) return -1;
  const auto& counter = impl->version_counter();
  if (!counter.enabled()) return -1;  // an inference tensor
  const auto found = tape.tables->ids.find(impl);
  if (found == tape.tables->ids.end()) {
    if (is_parameter(impl) && storage_of(impl) != nullptr) return add_parameter(tape, impl);
    const int external = add_external(tape, tensor);
    return external >= 0 ? external : ask_number(tape, tensor, site);
  }
  const int value = found->second;
  if (!is_current(tape, impl, value)) return -1;
  if (tape.tables->factories.empty()) return value;
  const Factory* factory = factory_at(*tape.tables, tape.tables->values[value].root);
  return factory == nullptr || may_read_factory(tape, *factory, tensor, site, is_written) ? value : -1;
}

// Whether a tensor stands for a number of the program, as in `x * 2.0`, and is of a dtype that numbers have.
inline bool is_number(const Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->is_wrapped_number() || !tensor.is_cpu() || tensor.dim() != 0) return false;
  const auto type = tensor.scalar_type();
  return type == at::kDouble || type == at::kLong || type == at::kBool || type == at::kComplexDouble;
}

inline at::Scalar number_in(const Tensor& tensor) {  // `item` would be an op
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return *static_cast<const double*>(data);
    case at::kLong:
      return *static_cast<const int64_t*>(data);
    case at::kBool:
      return *static_cast<const bool*>(data);
    default:
      return *static_cast<const c10::complex<double>*>(data);
  }
}

// Put the numbers of all tensors among the arguments into `scratch`; return false if Python has to run this op.
inline bool read_all(Tape& tape, const Site& site, const Stack& stack, size_t base) {
  auto& numbers = tape.tables->scratch;
  numbers.clear();
  const auto& kinds = site.op->arguments;
  const auto add = [&](const Tensor& tensor, bool is_written = false) {
    const int number = read(tape, tensor, site, is_written);
    numbers.push_back(number);
    return number >= 0;
  };
  for (size_t i = 0; i < kinds.size(); i++) {
    const IValue& argument = stack[base + i];
    switch (kinds[i]) {
      case Kind::PLAIN:
        break;
      case Kind::TENSOR:
        if (!argument.isTensor() || !argument.toTensor().defined()) break;
        if (is_number(argument.toTensor())) break;
        if (!add(argument.toTensor(), site.written == static_cast<int>(i))) return false;
        break;
      case Kind::TENSORS:
      case Kind::OPTIONAL_TENSORS:
        if (argument.isNone()) break;
        for (const IValue& one : argument.toListRef()) {
          const bool is_there = one.isTensor() && one.toTensor().defined();
          if (is_there ? !add(one.toTensor()) : kinds[i] == Kind::TENSORS) return false;  // see `push_again`
        }
        break;
    }
  }
  return !tape.needs_attention;
}

// What the pool holds for an argument that is a tensor on the tape. No op has a device where it may have a tensor.
inline const IValue& hole() {
  static const IValue* found = new IValue(at::Device(at::kCPU));
  return *found;
}

inline void push_arguments(Tables& t, const Site& site, const Stack& stack, size_t base) {
  const auto& kinds = site.op->arguments;
  for (size_t i = 0; i < kinds.size(); i++) {
    const IValue& argument = stack[base + i];
    switch (kinds[i]) {
      case Kind::PLAIN:
        t.pool.push_back(argument);
        break;
      case Kind::TENSOR:
        if (!argument.isTensor() || !argument.toTensor().defined())
          t.pool.push_back(argument);
        else if (is_number(argument.toTensor()))
          t.pool.emplace_back(number_in(argument.toTensor()));
        else
          t.pool.push_back(hole());
        break;
      case Kind::TENSORS:
      case Kind::OPTIONAL_TENSORS:
        if (argument.isNone()) {
          t.pool.emplace_back();
          break;
        }
        t.pool.emplace_back(static_cast<int64_t>(argument.toListRef().size()));
        if (kinds[i] == Kind::OPTIONAL_TENSORS)
          for (const IValue& one : argument.toListRef())
            t.pool.emplace_back(one.isTensor() && one.toTensor().defined());
        break;
    }
  }
}

// Number the results of an op as `Tape.add` does; return how many, which is 0 if they are all known already.
inline int add_results(Tape& tape, const std::vector<Tensor>& results) {
  Tables& t = *tape.tables;
  bool all_known = true;
  for (const Tensor& tensor : results) all_known = all_known && t.ids.find(tensor.unsafeGetTensorImpl()) != t.ids.end();
  if (all_known) return 0;
  sync(tape);
  for (const Tensor& tensor : results) {
    TensorImpl* impl = tensor.unsafeGetTensorImpl();
    StorageImpl* storage = storage_of(impl);
    const auto found = storage != nullptr ? t.roots.find(storage) : t.roots.end();
    if (found != t.roots.end()) {
      add_value(t, impl, found->second, t.values[found->second].version);
    } else {
      const auto& counter = impl->version_counter();
      const int value = add_value(t, impl, -1, counter.enabled() ? counter.current_version() : 0);
      if (storage != nullptr && tensor.layout() == at::kStrided) record_storage(t, storage, value);
    }
  }
  return static_cast<int>(results.size());
}

inline PyObject* wrapped(const Op& op, const Stack& stack, size_t base) {
  const auto one = [&](const IValue& value) -> PyObject* {
    if (value.isTensor()) return value.toTensor().defined() ? THPVariable_Wrap(value.toTensor()) : Py_NewRef(Py_None);
    if (!value.isTensorList()) return torch::jit::toPyObject(value).release().ptr();
    const auto tensors = value.toTensorVector();
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(tensors.size()));
    for (size_t i = 0; i < tensors.size(); i++)
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors[i]));
    return list;
  };
  if (op.results.size() == 1) return one(stack[base]);
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(op.results.size()));
  for (size_t i = 0; i < op.results.size(); i++)
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), one(stack[base + i]));
  return tuple;
}

// Let Python decide on the results, and keep those that are saved. `state`: of the default generator before the op, if
// the op has drawn from it and Python has not been told.
inline void ask_decision(Tape& tape, Site& site, const Stack& stack, size_t base, int count, const Entry& entry,
                         const Tensor& state) {
  Gil gil;
  PyObject* reads = PyList_New(entry.read_count);
  for (int k = 0; k < entry.read_count; k++)
    PyList_SET_ITEM(reads, k, PyLong_FromLong(tape.tables->reads[entry.reads + k]));
  const auto found = tape.tables->calls.find(site.object);
  const size_t call = found == tape.tables->calls.end() ? 0 : found->second;
  PyObject* out = wrapped(*site.op, stack, base);
  PyObject* drawn = state.defined() ? THPVariable_Wrap(state) : Py_NewRef(Py_None);
  PyObject* answer = PyObject_CallMethod(tape.recorder, "finish_native", "OOiiNN", site.object, out, entry.first, count,
                                         reads, drawn);
  Py_XDECREF(out);
  if (answer != nullptr && PyObject_IsTrue(answer) == 1) {
    if (site.depends_on_inputs.size() <= call) site.depends_on_inputs.resize(call + 1);
    site.depends_on_inputs[call] = true;
  }
  check(answer);
}

// Keep a result of an op in new memory, as `TapeRecorder.keep` does. With the GIL.
inline void keep(Tape& tape, int value, const Tensor& tensor, int rule) {
  // The region's own mode is off the stack.
  std::optional<torch::torch_dispatch_mode::StashTorchDispatchStackGuard> no_modes;
  if (tape.depth > 1) no_modes.emplace();
  put(tape.kept, value, THPVariable_Wrap(Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
                            c10::VariableVersion(0), false))));
  PyObject* alone = checked(PyList_New(1));
  PyList_SET_ITEM(alone, 0, PyLong_FromLong(value));
  put(tape.kept_in, value, alone);
  put(tape.rules, value, PyLong_FromLong(rule));
}

// Keep the results of an op that must be saved, if it has made all of them, as `TapeRecorder._save` does; return false,
// with nothing done, if Python has to.
inline bool keep_routing(Tape& tape, const Site& site, const Stack& stack, size_t base,
                         const std::vector<Tensor>& results, const Entry& entry, int count) {
  Tables& t = *tape.tables;
  if (count == 0 || !site.op->has_fixed_result(static_cast<size_t>(count))) return false;
  for (int value = entry.first; value < entry.first + count; value++)
    if (t.values[value].root != value) return false;
  Gil gil;
  t.calls[site.object]++;
  t.may_save = true;
  count_hit(t, site.rule);
  if (count != 1) put(tape.counts, static_cast<long>(t.entries.size()) - 1, PyLong_FromLong(count));
  for (int i = 0; i < count; i++) {
    const int value = entry.first + i;
    keep(tape, value, results.empty() ? stack[base].toTensor() : results[i], site.rule);
    if (tape.routing_sums == Py_None) continue;
    PyObject* kept = item(tape.kept, value);
    Owned number(checked(PyLong_FromLong(value)));
    const int done = put_checksum(tape.routing_sums, number.get(), THPVariable_Unpack(kept), false);
    if (done < 0) throw python_error();
    if (done == 0) check(PyObject_CallMethod(tape.recorder, "sum_up_routing", "O", number.get()));
  }
  Owned values(checked(PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyRange_Type), "ii", entry.first,
                                             entry.first + count)));
  Owned routed(checked(PyTuple_Pack(2, site.object, values.get())));
  if (PyList_Append(tape.routing, routed.get()) < 0) throw python_error();
  return true;
}

// Decide as `decide` of table.py does, and keep the results if they are saved; see `TapeRecorder.decide_on`.
inline void decide(Tape& tape, Site& site, const Stack& stack, size_t base, const std::vector<Tensor>& results,
                   const Entry& entry, const Tensor& state) {
  Tables& t = *tape.tables;
  const int count = static_cast<int>(t.values.size()) - entry.first;
  if (!state.defined() && site.must_save && keep_routing(tape, site, stack, base, results, entry, count)) return;
  if (state.defined() || site.verdict == Verdict::ASK_PYTHON)
    return ask_decision(tape, site, stack, base, count, entry, state);
  if (site.verdict != Verdict::RECOMPUTE) {
    int& call = t.calls[site.object];
    const bool saves = site.verdict == Verdict::SAVE || alternations_of(t, site.rule) % 2 == 0;
    if (saves) {
      Gil gil;
      bool are_new = count > 0;
      for (int value = entry.first; value < entry.first + count; value++)
        are_new = are_new && t.values[value].root == value;
      const auto number = static_cast<size_t>(call);
      if (!are_new || !site.op->has_fixed_result(static_cast<size_t>(count)) || site.depends_on_inputs.size() <= number || !site.depends_on_inputs[number])
        return ask_decision(tape, site, stack, base, count, entry, state);
      for (int i = 0; i < count; i++)
        keep(tape, entry.first + i, results.empty() ? stack[base].toTensor() : results[i], site.rule);
    }
    call++;
    t.may_save = true;
    if (site.verdict == Verdict::ALTERNATE) alternations_of(t, site.rule)++;
  }
  if (count != 1) {
    Gil gil;
    put(tape.counts, static_cast<long>(t.entries.size()) - 1, PyLong_FromLong(count));
  }
  count_hit(t, site.rule);
}

// The default generator of the CPU around an op that may draw from it.
struct Draw {
  explicit Draw(bool may_draw) {
    if (!may_draw) return;
    generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    before = generator.clone();
  }

  // The states before and after the op; undefined if it has drawn nothing.
  std::pair<Tensor, Tensor> states() {
    if (!before.defined()) return {};
    std::lock_guard<std::mutex> lock(generator.mutex());
    auto* now = at::check_generator<at::CPUGeneratorImpl>(generator);
    auto* then = at::check_generator<at::CPUGeneratorImpl>(before);
    const auto a = now->engine().data(), b = then->engine().data();
    if (a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.seeded_ == b.seeded_ &&
        a.state_ == b.state_ && now->next_float_normal_sample() == then->next_float_normal_sample() &&
        now->next_double_normal_sample() == then->next_double_normal_sample())
      return {};
    return {Tensor(then->get_state()), Tensor(now->get_state())};
  }

  at::Generator generator, before;
};

// Whether the only generator that an op may draw from is the default one of the CPU.
inline bool draws_on_cpu(const Op& op, const Stack& stack, size_t base) {
  for (size_t i = 0; i < op.arguments.size(); i++) {
    const IValue& argument = stack[base + i];
    if (argument.isTensor() && argument.toTensor().defined() && !argument.toTensor().is_cpu()) return false;
    if (argument.isDevice() && !argument.toDevice().is_cpu()) return false;
    if (argument.isGenerator() || argument.isTensorList()) return false;
  }
  return true;
}

// Number what an op has returned, unless it has returned arguments; return the tensors, unless there is just one.
inline std::vector<Tensor> number_results(Tape& tape, const Site& site, const Stack& stack, size_t base) {
  Tables& t = *tape.tables;
  const Op& op = *site.op;
  const bool is_new = site.written < 0 && (site.on_tape & FACTORY) == 0;
  if (op.returns_one_tensor && is_new && site.memory != Memory::UNSURE && stack[base].toTensor().defined() &&
      is_plain(stack[base].toTensor().unsafeGetTensorImpl())) {
    TensorImpl* impl = stack[base].toTensor().unsafeGetTensorImpl();
    if (site.memory == Memory::VIEW && !t.scratch.empty()) {  // not a view of a number
      const int root = t.values[t.scratch[0]].root;
      add_value(t, impl, root, t.values[t.scratch[0]].version);
    } else {
      t.unsynced.push_back(add_value(t, impl, -1, 0));
    }
    return {};
  }
  std::vector<Tensor> results;
  for (size_t i = 0; i < op.results.size(); i++) {
    const IValue& result = stack[base + i];
    if (result.isTensor() && result.toTensor().defined()) results.push_back(result.toTensor());
    if (result.isTensorList())
      for (const Tensor& one : result.toTensorVector()) results.push_back(one);
  }
  bool all_plain = true;
  for (const Tensor& one : results) all_plain = all_plain && is_plain(one.unsafeGetTensorImpl());
  if (!all_plain) {
    Gil gil;
    check(PyObject_CallMethod(tape.owner, "fail", "s", "an op on plain tensors made a tensor subclass"));
  }
  const int first = static_cast<int>(t.values.size());
  const int count = add_results(tape, results);
  if (site.memory != Memory::NEW && !t.scratch.empty())
    for (int value = first; value < first + count; value++) t.values[value].version = t.values[t.scratch[0]].version;
  return results;
}

// Copy the kept values of a root that an op is about to write to, as `TapeRecorder._copy_kept` does; return false, with
// nothing done, if Python has to. With the GIL.
inline bool copy_kept(Tape& tape, PyObject* root) {
  Owned values(Py_XNewRef(PyDict_GetItemWithError(tape.kept_in, root)));
  if (!values) {
    if (PyErr_Occurred() != nullptr) throw python_error();
    return true;
  }
  if (tape.depth != 1) return false;  // other modes see the copies, among them those that measure memory
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values.get()); i++) {
    PyObject* held = PyDict_GetItemWithError(tape.kept, PyList_GET_ITEM(values.get(), i));
    if (held == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(held)) != THPVariableClass) return false;
  }
  if (PyDict_DelItem(tape.kept_in, root) < 0) throw python_error();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values.get()); i++) {
    const Tensor held = tensor_from(PyDict_GetItemWithError(tape.kept, PyList_GET_ITEM(values.get(), i)));
    Tensor copy;
    {
      pybind11::gil_scoped_release no_gil;
      copy = held.clone();
    }
    Owned wrapped(checked(THPVariable_Wrap(copy)));
    if (PyDict_SetItem(tape.kept, PyList_GET_ITEM(values.get(), i), wrapped.get()) < 0) throw python_error();
  }
  return true;
}

// The root of the tensor that an op is about to write to, of which kept values have been copied; -1 if Python has to
// find out whether its present content is still needed. It is not, if the region has made the tensor. See
// `TapeRecorder.before_write`.
inline int root_to_write(Tape& tape, const IValue& argument) {
  if (!argument.isTensor() || !argument.toTensor().defined() || is_number(argument.toTensor())) return -1;
  TensorImpl* impl = argument.toTensor().unsafeGetTensorImpl();
  StorageImpl* storage = storage_of(impl);
  if (impl->layout() != at::kStrided || storage == nullptr) return -1;
  Tables& t = *tape.tables;
  sync(tape);
  const auto found = t.roots.find(storage);
  const auto known = t.ids.find(impl);
  if (found == t.roots.end() && known == t.ids.end()) return -1;
  const int root = found != t.roots.end() ? found->second : t.values[known->second].root;
  if (parameter_of(t, root) != nullptr) return -1;
  Gil gil;
  Owned key(checked(PyLong_FromLong(root)));
  const bool is_needed = has(tape.leaves, key.get()) || has(tape.unpacked_early, key.get()) ||
                         has(tape.parts, key.get());
  return is_needed || !copy_kept(tape, key.get()) ? -1 : root;
}

// Do what `Tape.add_write` does: the next entry writes to this root.
inline void add_write(Tape& tape, int root) {
  Tables& t = *tape.tables;
  remove_factory(t, root);
  Gil gil;
  Owned entry(checked(PyLong_FromSize_t(t.entries.size())));
  Owned roots(checked(Py_BuildValue("(i)", root)));
  if (PyDict_SetItem(tape.writes, entry.get(), roots.get()) < 0) throw python_error();
  PyObject* writers = item(tape.writers, root);
  if (writers == nullptr) {
    writers = checked(PyList_New(0));
    put(tape.writers, root, writers);
  }
  if (PyList_Append(writers, entry.get()) < 0) throw python_error();
}

// If autograd has saved, right before the op, what the op has written to, Python notes it.
inline void look_at_recent(Tape& tape, int root, int entry) {
  for (const Recent& one : tape.tables->recent) {
    if (one.root != root) continue;
    Gil gil;
    return check(PyObject_CallMethod(tape.recorder, "note_late_write", "i", entry));
  }
}

// Run and record one op, whose arguments are on the stack, while its mode is off the stack of modes; return false, with
// nothing done, if Python has to run it.
inline bool record(Tape& tape, const OperatorHandle& op, Stack* stack) {
  Site* site = site_of(tape, op);
  if (site == nullptr || (site->on_tape & ONLY_RERUN) != 0) return false;
  Tables& t = *tape.tables;
  const Op& known = *site->op;
  const size_t base = stack->size() - known.arguments.size();
  if (site->draws && !draws_on_cpu(known, *stack, base)) return false;
  if (!read_all(tape, *site, *stack, base)) return false;
  const int written = site->written >= 0 ? root_to_write(tape, (*stack)[base + site->written]) : -1;
  if (site->written >= 0 && written < 0) return false;
  Entry entry{site->object, &known, nullptr, static_cast<int>(t.pool.size()), 0,
              static_cast<int>(t.scratch.size()), 0};
  push_arguments(t, *site, *stack, base);
  if (written >= 0) add_write(tape, written);
  Draw draw(site->draws);
  try {
    op.callBoxed(stack);
  } catch (...) {
    t.pool.resize(entry.arguments);
    throw;
  }
  auto [before, after] = draw.states();
  entry.reads = static_cast<int>(t.reads.size());
  t.reads.insert(t.reads.end(), t.scratch.begin(), t.scratch.end());
  entry.first = static_cast<int>(t.values.size());
  const auto results = number_results(tape, *site, *stack, base);
  entry.draws = before.defined();
  const int number = static_cast<int>(t.entries.size());
  t.entries.push_back(entry);
  t.recorded++;
  if (entry.draws && site->verdict == Verdict::RECOMPUTE) note_draw(t, number, std::exchange(before, {}), after);
  decide(tape, *site, *stack, base, results, entry, before);
  if ((site->on_tape & FACTORY) != 0 && static_cast<int>(t.values.size()) > entry.first)
    t.factories.push_back(Factory{entry.first, number, (site->on_tape & UNINITIALISED) != 0});
  if (written >= 0) look_at_recent(tape, written, number);
  clear_recent(t);
  return true;
}

// -- Starting and ending a recording

// Begin to record on a tape; return false if Python has to record all ops of this call.
inline PyObject* start(PyObject*, PyObject* const* args, Py_ssize_t) {  // tape, mode, recorder, owner, sites, tables
  HANDLE_TH_ERRORS
  auto* tape = reinterpret_cast<Tape*>(args[0]);
  // Results are plain tensors if every mode below is one of these; under any other mode, Python records all ops.
  using TLS = c10::impl::TorchDispatchModeTLS;
  bool only_ours = true;
  tape->thread = PyThread_get_thread_ident();
  tape->depth = TLS::stack_len();
  for (int64_t i = 0; i + 1 < tape->depth; i++) {
    PyObject* one = TLS::get_stack_at(i)->ptr(getPyInterpreter());
    only_ours = only_ours && (tape_of(one) != nullptr || ids_of(one) != nullptr);
  }
  if (!only_ours) Py_RETURN_FALSE;
  tape->mode = args[1];
  tape->recorder = args[2];
  tape->owner = args[3];
  Py_XSETREF(tape->sites, reinterpret_cast<Sites*>(Py_NewRef(args[4])));
  Py_XSETREF(tape->python, Py_NewRef(args[5]));
  if (!PyArg_ParseTuple(tape->python, "OOOOOOOOOOOOO", &tape->kept, &tape->kept_in, &tape->persistent, &tape->counts,
                        &tape->writers, &tape->writes, &tape->seen_at, &tape->leaves, &tape->unpacked_early,
                        &tape->rules, &tape->parts, &tape->routing, &tape->routing_sums))
    return nullptr;
  tape->path = nullptr;
  tape->outer = recording;
  recording = tape;
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* stop(PyObject*, PyObject* object) {
  auto* tape = reinterpret_cast<Tape*>(object);
  for (Tape** one = &recording; *one != nullptr; one = &(*one)->outer)
    if (*one == tape) {
      *one = tape->outer;
      break;
    }
  tape->outer = nullptr;
  tape->mode = tape->recorder = tape->owner = nullptr;
  tape->path_sites = nullptr;
  Py_RETURN_NONE;
}

}  // namespace sac
