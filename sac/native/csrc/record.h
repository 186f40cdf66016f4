// Records ordinary ops: those that read tensors, return new tensors, and have no trait that Python has to handle.
#pragma once

#include "tape.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

namespace sac {

// A mode's part that is read without the GIL, by the thread on whose stack the mode is.
struct Mode {
  PyObject_HEAD
  PyObject* sites;  // the call sites of the module that runs, by id of the op
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

// The number of a tensor that an op reads, or -1 if Python has to look at it.
inline int read(Tape& tape, const Tensor& tensor, const Site& site) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!is_plain(impl)) return -1;
  const auto& counter = impl->version_counter();
  if (!counter.enabled()) return -1;  // an inference tensor
  const auto found = tape.tables->ids.find(impl);
  if (found == tape.tables->ids.end()) {
    if (is_parameter(impl) && storage_of(impl) != nullptr) return add_parameter(tape, impl);
    return ask_number(tape, tensor, site);
  }
  const Value& value = tape.tables->values[found->second];
  if (is_factory(*tape.tables, value.root) || has_moved(value, impl)) return -1;
  return counter.current_version() == value.version ? found->second : -1;
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
  const auto add = [&](const Tensor& tensor) {
    const int number = read(tape, tensor, site);
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
        if (!add(argument.toTensor())) return false;
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

inline void check(PyObject* answer) {
  if (answer == nullptr) throw python_error();
  Py_DECREF(answer);
}

// Let Python decide on the results, and keep those that are saved. `state`: of the default generator before the op, if
// the op has drawn from it.
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

inline void put(PyObject* table, long key, PyObject* value) {  // steals the value; with the GIL
  PyObject* number = PyLong_FromLong(key);
  const bool done = value != nullptr && PyDict_SetItem(table, number, value) == 0;
  Py_DECREF(number);
  Py_XDECREF(value);
  if (!done) throw python_error();
}

// Keep a result of an op in new memory, as `TapeRecorder.keep` does. With the GIL.
inline void keep(Tape& tape, int value, const Tensor& tensor, int rule) {
  torch::torch_dispatch_mode::StashTorchDispatchStackGuard no_modes;
  put(tape.kept, value, THPVariable_Wrap(Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
                            c10::VariableVersion(0), false))));
  put(tape.kept_in, value, Py_BuildValue("[i]", value));
  put(tape.rules, value, PyLong_FromLong(rule));
}

// Decide as `decide` of table.py does, and keep the results if they are saved; see `TapeRecorder.decide_on`.
inline void decide(Tape& tape, Site& site, const Stack& stack, size_t base, const std::vector<Tensor>& results,
                   const Entry& entry, const Tensor& state) {
  Tables& t = *tape.tables;
  const int count = static_cast<int>(t.values.size()) - entry.first;
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

  Tensor state_before() {  // undefined if the op has drawn nothing
    if (!before.defined()) return {};
    std::lock_guard<std::mutex> lock(generator.mutex());
    auto* now = at::check_generator<at::CPUGeneratorImpl>(generator);
    auto* then = at::check_generator<at::CPUGeneratorImpl>(before);
    const auto a = now->engine().data(), b = then->engine().data();
    if (a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.seeded_ == b.seeded_ &&
        a.state_ == b.state_ && now->next_float_normal_sample() == then->next_float_normal_sample() &&
        now->next_double_normal_sample() == then->next_double_normal_sample())
      return {};
    return Tensor(then->get_state());
  }

  at::Generator generator, before;
};

// Whether the only generator that an op may draw from is the default one of the CPU.
inline bool draws_on_cpu(const Op& op, const Stack& stack, size_t base) {
  bool has_tensor = false;
  for (size_t i = 0; i < op.arguments.size(); i++) {
    const IValue& argument = stack[base + i];
    if (argument.isTensor() && argument.toTensor().defined()) {
      has_tensor = true;
      if (!argument.toTensor().is_cpu()) return false;
    } else if (argument.isGenerator() || argument.isDevice() || argument.isTensorList()) {
      return false;
    }
  }
  return has_tensor;
}

// Number what an op has returned, unless it has returned arguments; return the tensors, unless there is just one.
inline std::vector<Tensor> number_results(Tape& tape, const Site& site, const Stack& stack, size_t base) {
  Tables& t = *tape.tables;
  const Op& op = *site.op;
  if (op.returns_one_tensor && site.memory != Memory::UNSURE && stack[base].toTensor().defined() &&
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

// Run and record one op, whose arguments are on the stack; return false, with nothing done, if Python has to run it.
inline bool record(Tape& tape, const OperatorHandle& op, Stack* stack) {
  Site* site = site_of(tape, op);
  if (site == nullptr || site->is_only_rerun) return false;
  Tables& t = *tape.tables;
  const Op& known = *site->op;
  const size_t base = stack->size() - known.arguments.size();
  if (site->draws && !draws_on_cpu(known, *stack, base)) return false;
  // As in a mode's own handler, the mode is off the stack: what Python runs in here (a finalizer, a signal handler) is
  // not recorded, and finds nothing half done.
  torch::torch_dispatch_mode::StashTorchDispatchModeGuard stash;
  if (!read_all(tape, *site, *stack, base)) return false;
  Entry entry{site->object, &known, nullptr, static_cast<int>(t.pool.size()), 0,
              static_cast<int>(t.scratch.size()), 0};
  push_arguments(t, *site, *stack, base);
  Draw draw(site->draws);
  try {
    op.callBoxed(stack);
  } catch (...) {
    t.pool.resize(entry.arguments);
    throw;
  }
  entry.reads = static_cast<int>(t.reads.size());
  t.reads.insert(t.reads.end(), t.scratch.begin(), t.scratch.end());
  entry.first = static_cast<int>(t.values.size());
  const auto results = number_results(tape, *site, *stack, base);
  const Tensor state = draw.state_before();
  entry.draws = state.defined();
  t.entries.push_back(entry);
  t.recorded++;
  decide(tape, *site, *stack, base, results, entry, state);
  clear_recent(t);
  return true;
}

// -- Starting and ending a recording

// Begin to record on a tape; return false if Python has to record all ops of this call.
inline PyObject* start(PyObject*, PyObject* const* args, Py_ssize_t) {  // tape, mode, recorder, owner, kept, …, sites
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
  tape->kept = args[4];
  tape->kept_in = args[5];
  tape->persistent = args[6];
  tape->rules = args[7];
  tape->counts = args[8];
  Py_XSETREF(tape->sites, reinterpret_cast<Sites*>(Py_NewRef(args[9])));
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
