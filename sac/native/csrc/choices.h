// What ops that choose return in a watched call, and its recomputation; see Note [Watched calls] in
// sac/recompute/native_watch.py.
//
// These ops have kernels of ours at a dispatch key that no tensor has, and at which all other ops fall through. The key is
// active on a thread while a watch that holds choices, or a recomputation that is served them, is on it. It lies above
// autograd and the modes, which see the ops as always: the kernel runs an op as if it were not there, and looks at what it
// returns.
#pragma once

#include "checksum.h"
#include "fill.h"
#include "watch.h"

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

namespace sac {

constexpr auto CHOICES = c10::DispatchKey::DeferredInit;  // of a library that is not developed any more

// The recomputation of a watched call.
struct Serving {
  PyObject_HEAD
  Watch* watch;
  Serving* outer;
  int64_t depth;                                                      // of the ops that run now
  const WatchedOp* expected;                                          // the outermost op, if it chooses
  std::vector<bool>* is_served;                                       // by choice
  std::unordered_map<const WatchedOp*, size_t>* next;                 // the choice to be served next
  std::unordered_map<const WatchedOp*, std::vector<IValue>>* others;  // the arguments of a call that did not fit
  at::CallbackHandle callback;
  char was_paused;
};

inline thread_local Serving* serving = nullptr;  // the innermost one on this thread
inline thread_local int interceptions = 0;       // how many wanted it

inline void intercept_choices(bool is_wanted) {
  interceptions += is_wanted ? 1 : -1;
  c10::impl::tls_set_dispatch_key_included(CHOICES, interceptions > 0);
}

// -- Forward

inline bool is_ordinary(const Tensor& tensor) {
  const TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return is_plain(impl) && !impl->has_symbolic_sizes_strides() && tensor.layout() == at::kStrided &&
         impl->version_counter().enabled() && storage_of(impl) != nullptr;
}

// Describe the arguments of an op; nothing if a tensor is not an ordinary one.
inline std::optional<std::vector<IValue>> describe(const OperatorHandle& op, const Stack& stack) {
  std::vector<IValue> found;
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); i++) {
    if (!stack[i].isTensor()) {
      found.push_back(stack[i]);
    } else if (const Tensor& tensor = stack[i].toTensor(); !tensor.defined()) {
      found.emplace_back();
    } else {
      if (!is_ordinary(tensor)) return {};
      found.push_back(c10::ivalue::Tuple::create(IValue(tensor.sizes().vec()), IValue(tensor.scalar_type())));
    }
  }
  return found;
}

// Whether checksums consist of numbers, and are equal.
inline bool have_equal_numbers(PyObject* one, PyObject* other) {
  if (!PyTuple_Check(one) || !PyTuple_Check(other) || PyTuple_GET_SIZE(one) != PyTuple_GET_SIZE(other)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(one); i++)
    if (!PyLong_CheckExact(PyTuple_GET_ITEM(one, i)) || !PyLong_CheckExact(PyTuple_GET_ITEM(other, i))) return false;
  return PyObject_RichCompareBool(one, other, Py_EQ) == 1;
}

// The checksums of tensors, owned.
inline PyObject* sums_of_chosen(const Watch& watch, const std::vector<Chosen>& results) {
  std::vector<int64_t> sums;
  for (const Chosen& one : results) sums.push_back(checksum_of(one.tensor, false));
  if (std::all_of(sums.begin(), sums.end(), [](int64_t sum) { return sum >= 0; })) {
    Owned found(checked(PyTuple_New(static_cast<Py_ssize_t>(sums.size()))));
    for (size_t i = 0; i < sums.size(); i++)
      PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), checked(PyLong_FromLongLong(sums[i])));
    return found.release();
  }
  at::RecordFunctionGuard unwatched(false);
  Owned tensors(checked(PyTuple_New(static_cast<Py_ssize_t>(results.size()))));
  for (size_t i = 0; i < results.size(); i++)
    PyTuple_SET_ITEM(tensors.get(), static_cast<Py_ssize_t>(i), checked(THPVariable_Wrap(results[i].tensor)));
  return checked(PyObject_CallMethod(watch.owner, "sums_of", "(O)", tensors.get()));
}

// The results of an op, which lie on top of the stack; nothing if one is not an ordinary tensor in new memory.
inline std::optional<std::vector<Chosen>> take_results(const OperatorHandle& op, const Stack& stack,
                                                       const std::vector<StorageImpl*>& read) {
  std::vector<Chosen> found;
  torch::torch_dispatch_mode::StashTorchDispatchStackGuard no_modes;
  for (size_t i = stack.size() - op.schema().returns().size(); i < stack.size(); i++) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined() || !is_ordinary(stack[i].toTensor())) return {};
    TensorImpl* impl = stack[i].toTensor().unsafeGetTensorImpl();
    if (std::find(read.begin(), read.end(), storage_of(impl)) != read.end()) return {};
    const auto& counter = impl->version_counter();
    found.push_back({Tensor(impl->shallow_copy_and_detach(counter, false)), counter.current_version()});
  }
  return found;
}

// Run an op that chooses, and let `watch` hold what it returns, if that is possible.
inline void run_and_hold(Watch& watch, const OperatorHandle& op, c10::DispatchKeySet below, Stack* stack) {
  Choice choice{std::exchange(watch.expected, nullptr)};
  auto arguments = describe(op, *stack);
  std::vector<StorageImpl*> read;
  if (arguments)
    for (size_t i = stack->size() - arguments->size(); i < stack->size(); i++)
      if ((*stack)[i].isTensor() && (*stack)[i].toTensor().defined())
        read.push_back(storage_of((*stack)[i].toTensor().unsafeGetTensorImpl()));
  const auto& handles = *watch.handles->list;
  choice.packed = handles.size();
  op.redispatchBoxed(below, stack);
  auto results = arguments ? take_results(op, *stack, read) : std::nullopt;
  if (!results) return note(watch, Reason::CHOOSES, choice.op);
  choice.arguments = std::move(*arguments);
  choice.results = std::move(*results);
  for (const Choice& one : *watch.choices) choice.number += one.op == choice.op ? 1 : 0;
  // Autograd may have saved what the op read before it ran, and what it made afterwards.
  const auto is_result = [&](const Handle* handle) {
    for (const Chosen& one : choice.results)
      if (handle != nullptr && handle->storage == one.storage()) return true;
    return false;
  };
  while (choice.packed < handles.size() && !is_result(handles[choice.packed])) choice.packed++;
  if (watch.compares) {
    Gil gil;
    choice.sums = sums_of_chosen(watch, choice.results);
  }
  watch.choices->push_back(std::move(choice));
}

// An op is about to write to a storage: hold copies of what lies in it. Torch swallows what a callback throws: without a
// copy, the activations are kept.
inline void copy_chosen(Watch& watch, StorageImpl* storage) {
  const auto address = reinterpret_cast<unsigned long long>(storage);
  const WatchedOp* written = nullptr;
  try {
    for (Choice& choice : *watch.choices)
      for (Chosen& one : choice.results) {
        if (one.storage() != address) continue;
        written = choice.op;
        at::RecordFunctionGuard unwatched(false);
        one.is_lost = one.is_changed();
        one.tensor = one.tensor.clone();
        one.is_written = true;
      }
  } catch (...) {
    note(watch, Reason::CHOOSES, written);
    Gil gil;
    PyErr_Clear();
  }
  if (written == nullptr) return;
  const auto& handles = *watch.handles->list;  // another tensor may lie at this address later
  for (size_t i = 0; i < handles.size(); i++)
    if (handles[i] != nullptr && handles[i]->storage == address) watch.kept->push_back(i);
}

// The forward is over: let handles keep what autograd has saved of choices, as a recorder lets them.
inline PyObject* watch_keep(Watch* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const auto* packed = reinterpret_cast<FrameHooks*>(object)->packed;
  if (self->choices->empty() || packed == nullptr) Py_RETURN_NONE;
  const auto& handles = *self->handles->list;
  const auto keep = [&](size_t index) {
    Handle* handle = index < handles.size() && index < packed->size() ? handles[index] : nullptr;
    if (handle == nullptr || handle->is_kept) return;
    const auto& [tensor, version] = (*packed)[index];
    PyObject* kept = checked(tensor.is_leaf() ? THPVariable_Wrap(tensor) : without_graph(tensor));
    handle->is_kept = 1;
    handle->version = version;
    Py_XSETREF(handle->watched, Py_NewRef(kept));
    Py_XSETREF(handle->value, kept);
  };
  for (const size_t index : *self->kept) keep(index);
  std::unordered_map<unsigned long long, uint32_t> held;  // address of a storage -> version
  for (const Choice& choice : *self->choices)
    for (const Chosen& one : choice.results)
      if (!one.is_written) held[one.storage()] = one.version;
  for (size_t index = 0; index < handles.size() && index < packed->size(); index++) {
    const auto found = handles[index] != nullptr ? held.find(handles[index]->storage) : held.end();
    if (found != held.end() && (*packed)[index].second <= static_cast<Py_ssize_t>(found->second)) keep(index);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The forward is over: release what no recomputation needs that fills the handles up to `last_missing`. Returns the
// storages of what stays, and of what does not, each with its bytes; None if nothing was held.
inline PyObject* watch_close(Watch* self, PyObject* last_missing) {
  HANDLE_TH_ERRORS
  const long long last = PyLong_AsLongLong(last_missing);
  if (last == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (self->choices->empty()) Py_RETURN_NONE;
  Owned stays(checked(PyDict_New())), goes(checked(PyDict_New()));
  std::vector<Choice> choices;
  choices.swap(*self->choices);
  for (Choice& choice : choices) {
    const bool is_needed = static_cast<long long>(choice.packed) <= last;
    for (const Chosen& one : choice.results) {
      choice.runs_again = choice.runs_again || one.is_changed();
      Owned address(checked(PyLong_FromUnsignedLongLong(one.storage())));
      Owned bytes(checked(PyLong_FromSize_t(storage_of(one.tensor.unsafeGetTensorImpl())->nbytes())));
      if (PyDict_SetItem(is_needed ? stays.get() : goes.get(), address.get(), bytes.get()) < 0) throw python_error();
    }
    if (is_needed)
      self->choices->push_back(std::move(choice));
    else
      Py_XDECREF(choice.sums);
  }
  return PyTuple_Pack(2, stays.get(), goes.get());
  END_HANDLE_TH_ERRORS
}

inline PyObject* watch_forget(Watch* self, PyObject*) {
  forget_choices(self);
  Py_RETURN_NONE;
}

inline PyObject* watch_holds_choices(Watch* self, PyObject*) { return PyBool_FromLong(!self->choices->empty()); }

// -- Recomputation

// Put what the forward has chosen in place of what an op has chosen now, which is at `at` on the stack.
inline void put_chosen(const Serving& self, const Choice& choice, const Chosen& one, IValue& at) {
  const Tensor& now = at.toTensor();
  torch::torch_dispatch_mode::StashTorchDispatchStackGuard no_modes;
  at::AutoDispatchBelowADInplaceOrView no_graph;
  at::RecordFunctionGuard unwatched(false);
  if (now.defined() && is_ordinary(now) && now.sizes() == one.tensor.sizes() && now.dtype() == one.tensor.dtype() &&
      now.device() == one.tensor.device()) {
    // Into its memory, of which autograd may have saved a part. Nobody else has seen it: its version does not move.
    Tensor(now.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true)).copy_(one.tensor);
  } else if (now.defined() && !now.requires_grad()) {
    at = one.tensor.clone();
  } else {
    Gil gil;
    Owned then(checked(THPVariable_Wrap(one.tensor))), found(checked(THPVariable_Wrap(now)));
    Owned(checked(PyObject_CallMethod(self.watch->owner, "refuse", "ssOO", choice.op->name.c_str(),
                                      choice.op->overload.c_str(), then.get(), found.get())));
  }
}

// Run an op that chooses, and let it return what it has returned in forward.
inline void run_and_serve(Serving& self, const OperatorHandle& op, c10::DispatchKeySet below, Stack* stack) {
  const WatchedOp* known = std::exchange(self.expected, nullptr);
  auto& choices = *self.watch->choices;
  size_t& next = (*self.next)[known];
  while (next < choices.size() && choices[next].op != known) next++;
  if (next == choices.size()) return op.redispatchBoxed(below, stack);
  const size_t index = next;
  auto arguments = describe(op, *stack);
  if (!arguments || *arguments != choices[index].arguments) {
    (*self.others)[known] = arguments ? std::move(*arguments) : std::vector<IValue>();
    return op.redispatchBoxed(below, stack);
  }
  next++;
  (*self.is_served)[index] = true;  // autograd may save the last missing tensor inside of this op, and end the run
  op.redispatchBoxed(below, stack);
  const Choice& choice = choices[index];
  const size_t first = stack->size() - choice.results.size();
  if (!choice.runs_again) {
    for (size_t i = 0; i < choice.results.size(); i++)
      put_chosen(self, choice, choice.results[i], (*stack)[first + i]);
  } else if (choice.sums != nullptr) {
    const auto results = take_results(op, *stack, {});
    Gil gil;
    Owned sums(results ? sums_of_chosen(*self.watch, *results) : Py_NewRef(Py_None));
    Owned(checked(PyObject_CallMethod(self.watch->owner, "compare", "ssOO", choice.op->name.c_str(),
                                      choice.op->overload.c_str(), sums.get(), choice.sums)));
  }
}

// The kernel of ops that choose.
inline void choose(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, CHOICES);
  const auto is_outermost = [&](const WatchedOp* expected) {  // not run by another op's kernel
    return expected != nullptr && expected->name == op.schema().name() &&
           expected->overload == op.schema().overload_name();
  };
  if (serving != nullptr) {
    if (is_outermost(serving->expected)) return run_and_serve(*serving, op, below, stack);
  } else {
    for (Watch* watch = watching; watch != nullptr; watch = watch->outer)
      if (is_outermost(watch->expected)) return run_and_hold(*watch, op, below, stack);
  }
  op.redispatchBoxed(below, stack);
}

// Names of ops, with their overloads: give them kernels, once and for good. Returns whether that is possible.
inline PyObject* intercept(PyObject*, PyObject* names) {
  HANDLE_TH_ERRORS
  static int is_done = 0;
  if (is_done == 0) {
    is_done = -1;
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(CHOICES)) Py_RETURN_FALSE;
    static auto* rest = new torch::Library(torch::Library::IMPL, "_", CHOICES, __FILE__, __LINE__);
    static auto* ours = new torch::Library(torch::Library::IMPL, "aten", CHOICES, __FILE__, __LINE__);
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++)
      ours->impl(PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i)), torch::CppFunction::makeFromBoxedFunction<&choose>());
    rest->fallback(torch::CppFunction::makeFallthrough());
    is_done = 1;
  }
  return PyBool_FromLong(is_done == 1);
  END_HANDLE_TH_ERRORS
}

inline std::unique_ptr<at::ObserverContext> served_op_begins(const at::RecordFunction& function) {
  if (serving == nullptr) return nullptr;
  const WatchedOp* op = watched_op(*serving->watch->ops, function);
  if (op == nullptr || op->is_composite) return nullptr;
  for (Serving* one = serving; one != nullptr; one = one->outer) {
    const WatchedOp* known = one->watch->ops == serving->watch->ops ? op : watched_op(*one->watch->ops, function);
    if (one->depth == 0 && known != nullptr && known->is_holdable) one->expected = known;
    one->depth++;
  }
  return nullptr;
}

inline void served_op_ends(const at::RecordFunction& function, at::ObserverContext*) {
  if (serving == nullptr) return;
  const WatchedOp* op = watched_op(*serving->watch->ops, function);
  if (op == nullptr || op->is_composite) return;
  for (Serving* one = serving; one != nullptr; one = one->outer)
    if (--one->depth == 0) one->expected = nullptr;
}

inline PyObject* serving_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* watch = nullptr;
  if (!PyArg_ParseTuple(args, "O", &watch)) return nullptr;
  auto* self = reinterpret_cast<Serving*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->watch = reinterpret_cast<Watch*>(Py_NewRef(watch));
  self->is_served = new std::vector<bool>(self->watch->choices->size());
  self->next = new std::unordered_map<const WatchedOp*, size_t>();
  self->others = new std::unordered_map<const WatchedOp*, std::vector<IValue>>();
  return reinterpret_cast<PyObject*>(self);
}

inline void serving_dealloc(Serving* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(self->watch);
  delete self->is_served;
  delete self->next;
  delete self->others;
  type->tp_free(self);
  Py_DECREF(type);
}

// Mark the choices to which something unseen has written since.
inline void look_for_changes(Watch& watch) {
  for (Choice& choice : *watch.choices) {
    for (const Chosen& one : choice.results) choice.runs_again = choice.runs_again || one.is_changed();
    if (choice.sums == nullptr || choice.runs_again) continue;
    Owned sums(sums_of_chosen(watch, choice.results));
    if (have_equal_numbers(sums.get(), choice.sums)) continue;
    Owned same(checked(PyObject_CallMethod(watch.owner, "are_same", "OO", sums.get(), choice.sums)));
    choice.runs_again = same.get() == Py_False;
  }
}

inline PyObject* serving_enter(Serving* self, PyObject*) {
  HANDLE_TH_ERRORS
  look_for_changes(*self->watch);
  if (serving == nullptr)
    self->callback = at::addThreadLocalCallback(at::RecordFunctionCallback(served_op_begins, served_op_ends)
                                                    .scopes({at::RecordScope::FUNCTION}));
  Py_INCREF(self);  // for the chain
  self->outer = serving;
  serving = self;
  self->was_paused = std::exchange(self->watch->is_paused, 1);
  intercept_choices(true);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* serving_exit(Serving* self, PyObject* const*, Py_ssize_t) {
  HANDLE_TH_ERRORS
  for (Serving** one = &serving; *one != nullptr; one = &(*one)->outer)
    if (*one == self) {
      *one = self->outer;
      self->outer = nullptr;
      self->watch->is_paused = self->was_paused;
      if (serving == nullptr) at::removeCallback(self->callback);
      intercept_choices(false);
      Py_DECREF(self);
      break;
    }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// An argument for a message: of a tensor its shape and dtype.
inline PyObject* as_told(const IValue& argument) {
  if (!argument.isTuple()) return torch::jit::toPyObject(argument).release().ptr();
  const auto& parts = argument.toTupleRef().elements();
  Owned shape(checked(torch::jit::toPyObject(parts[0]).release().ptr()));
  return PyTuple_Pack(2, shape.get(), reinterpret_cast<PyObject*>(torch::getTHPDtype(parts[1].toScalarType())));
}

inline PyObject* all_as_told(const std::vector<IValue>& arguments) {
  Owned found(checked(PyTuple_New(static_cast<Py_ssize_t>(arguments.size()))));
  for (size_t i = 0; i < arguments.size(); i++)
    PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), checked(as_told(arguments[i])));
  return found.release();
}

// The choice that was not served, although a run that filled the handles up to `reached` had to get there: the op, its
// number, the arguments, and those of a call in recomputation that did not fit. None if there is none.
inline PyObject* serving_left(Serving* self, PyObject* reached) {
  HANDLE_TH_ERRORS
  const long long last = PyLong_AsLongLong(reached);
  if (last == -1 && PyErr_Occurred() != nullptr) return nullptr;
  for (size_t i = 0; i < self->is_served->size(); i++) {
    const Choice& choice = (*self->watch->choices)[i];
    if ((*self->is_served)[i] || static_cast<long long>(choice.packed) > last) continue;
    const auto other = self->others->find(choice.op);
    Owned told(checked(all_as_told(choice.arguments)));
    Owned seen(other != self->others->end() ? checked(all_as_told(other->second)) : Py_NewRef(Py_None));
    return Py_BuildValue("(snOO)", choice.op->name.c_str(), static_cast<Py_ssize_t>(choice.number), told.get(),
                         seen.get());
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
