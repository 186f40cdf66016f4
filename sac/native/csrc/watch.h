// Watches the ops of a call that no recorder sees; see Note [Watched calls] in sac/recompute/native_watch.py.
//
// Torch reports each op to the callbacks of its thread when the op begins and when it ends, also if no mode is active.
#pragma once

#include "handles.h"

#include <ATen/record_function.h>

#include <array>
#include <cstring>
#include <unordered_set>

namespace sac {

// What is known of one op.
struct WatchedOp {
  std::string name;  // as torch reports it
  std::string overload;
  bool chooses = false;
  bool is_holdable = false;  // it chooses, and a watch may hold what it returns
  bool is_ignored = false;   // its writes are not the region's own
  bool takes_generator = false;
  bool is_composite = false;  // it consists of other ops, which torch reports too
  std::vector<size_t> written;  // positions of the arguments that it writes to
  std::vector<size_t> spoilt;   // those of them that it does not return: autograd saves them before they are written
};

// The ops that have been met so far. `classify` returns whether an op chooses, whether a watch may hold what it returns,
// and whether its writes are ignored. Threads read the table without the GIL, so it has a lock, the one of the call sites.
struct WatchedOps {
  PyObject_HEAD
  PyObject* classify;
  uint64_t number;  // no other table has had it
  std::unordered_map<const char*, std::unique_ptr<WatchedOp>>* known;  // by address of the name in the op's schema
};

enum class Reason : int { CHOOSES = 0, DRAWS = 1, SPOILS = 2 };

// What an op that chooses has returned.
struct Chosen {
  Tensor tensor;  // without graph
  uint32_t version;
  bool is_written = false;  // the region writes to the result, and this is a copy
  bool is_lost = false;     // something unseen has written to it

  unsigned long long storage() const {
    return reinterpret_cast<unsigned long long>(storage_of(tensor.unsafeGetTensorImpl()));
  }

  bool is_changed() const {
    return is_lost || (!is_written && tensor.unsafeGetTensorImpl()->version_counter().current_version() != version);
  }
};

// A call of such an op; see choices.h.
struct Choice {
  const WatchedOp* op;
  int64_t number = 0;             // how many calls of it came before
  std::vector<IValue> arguments;  // what describes a tensor stands in its place
  std::vector<Chosen> results;
  PyObject* sums = nullptr;  // their checksums, owned; nullptr if they are not compared
  size_t packed = 0;         // how many tensors autograd had saved when the op had run
  bool runs_again = false;   // the results have changed
};

struct Watch {
  PyObject_HEAD
  WatchedOps* ops;
  Handles* handles;
  Watch* outer;
  int64_t depth;  // of the ops that run now, without those that consist of others
  const WatchedOp* found;
  Reason reason;
  std::unordered_set<StorageImpl*>* written;
  std::vector<Choice>* choices;
  std::vector<size_t>* kept;  // indices of the handles of choices that the region has written to since
  PyObject* owner;            // of Python's, which computes checksums and raises errors
  const WatchedOp* expected;  // the outermost op, if what it returns is to be held and is not yet
  char holds;                 // whether results of ops that choose are held
  char compares;              // and whether they are compared with what was held
  char is_paused;             // a recomputation runs inside of the region's own forward
};

inline void copy_chosen(Watch& watch, StorageImpl* storage);  // see choices.h
inline void intercept_choices(bool is_wanted);

inline thread_local Watch* watching = nullptr;  // the innermost one on this thread

inline std::unique_ptr<WatchedOp> new_watched_op(WatchedOps& ops, const c10::FunctionSchema& schema) {
  auto op = std::make_unique<WatchedOp>();
  op->name = schema.name();
  op->overload = schema.overload_name();
  const auto handle = c10::Dispatcher::singleton().findOp(schema.operator_name());
  op->is_composite = handle && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  const auto is_returned = [&](const c10::AliasInfo& written) {
    for (const auto& result : schema.returns())
      if (result.alias_info() != nullptr && result.alias_info()->beforeSets() == written.beforeSets()) return true;
    return false;
  };
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    if (argument.type()->str().find("Generator") != std::string::npos) op->takes_generator = true;
    if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) continue;
    op->written.push_back(i);
    if (!is_returned(*argument.alias_info())) op->spoilt.push_back(i);
  }
  Gil gil;
  PyObject* traits = PyObject_CallFunction(ops.classify, "ss", op->name.c_str(), op->overload.c_str());
  int chooses = 0, is_holdable = 0, is_ignored = 0;
  if (traits == nullptr || !PyArg_ParseTuple(traits, "ppp", &chooses, &is_holdable, &is_ignored))
    PyErr_WriteUnraisable(ops.classify);
  Py_XDECREF(traits);
  op->chooses = chooses != 0;
  op->is_holdable = is_holdable != 0;
  op->is_ignored = is_ignored != 0;
  return op;
}

inline const WatchedOp* find_or_make(WatchedOps& ops, const char* name, const at::RecordFunction& function) {
  {
    std::shared_lock<std::shared_mutex> reading(sites_lock);
    const auto found = ops.known->find(name);
    if (found != ops.known->end()) return found->second.get();
  }
  const auto schema = function.operator_schema();
  if (!schema) return nullptr;
  auto made = new_watched_op(ops, *schema);
  std::unique_lock<std::shared_mutex> writing(sites_lock);
  auto& known = (*ops.known)[name];
  if (!known) known = std::move(made);
  return known.get();
}

// What this thread has looked up lately. A table's number, not its address: another may lie there by now.
struct Lately {
  const char* name = nullptr;
  uint64_t table = 0;
  const WatchedOp* op = nullptr;
};

inline thread_local std::array<Lately, 512> lately;

// The op that torch reports, or nullptr: a function of Python's is not one. Its name may lie where another's lay.
inline const WatchedOp* watched_op(WatchedOps& ops, const at::RecordFunction& function) {
  const char* name = function.name();
  Lately& last = lately[(reinterpret_cast<uintptr_t>(name) >> 4) % lately.size()];
  if (last.name != name || last.table != ops.number) {
    const WatchedOp* op = find_or_make(ops, name, function);
    if (op == nullptr) return nullptr;
    last = Lately{name, ops.number, op};
  }
  return strcmp(last.op->name.c_str(), name) == 0 ? last.op : nullptr;
}

inline void note(Watch& watch, Reason reason, const WatchedOp* op) {
  if (watch.found != nullptr) return;
  watch.found = op;
  watch.reason = reason;
}

template <typename Function>
void for_each_tensor(const IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) function(tensor);
  }
}

struct Spoilt {
  Watch* watch;
  const WatchedOp* op;
  StorageImpl* storage;
  size_t packed;  // how many tensors autograd had saved before the op
};

// What an op leaves for its end.
struct Running final : at::ObserverContext {
  std::vector<Spoilt> spoilt;
};

inline void look(Watch& watch, const WatchedOp* op, const at::RecordFunction& function,
                 std::unique_ptr<Running>& running) {
  if (watch.depth > 0 || watch.is_paused) return;
  const auto inputs = function.inputs();
  if (op->takes_generator)
    for (const IValue& input : inputs)
      if (input.isGenerator() && input.toGenerator().defined()) note(watch, Reason::DRAWS, op);
  if (op->chooses && !op->is_composite) {
    if (watch.holds && op->is_holdable)
      watch.expected = op;
    else
      note(watch, Reason::CHOOSES, op);
  }
  for (const size_t position : op->written)
    if (position < inputs.size() && !op->is_ignored)
      for_each_tensor(inputs[position], [&](const Tensor& tensor) {
        StorageImpl* storage = storage_of(tensor.unsafeGetTensorImpl());
        if (storage == nullptr) return;
        watch.written->insert(storage);
        if (!watch.choices->empty()) copy_chosen(watch, storage);
      });
  if (op->is_composite || op->is_ignored) return;
  for (const size_t position : op->spoilt)
    if (position < inputs.size())
      for_each_tensor(inputs[position], [&](const Tensor& tensor) {
        StorageImpl* storage = storage_of(tensor.unsafeGetTensorImpl());
        if (storage == nullptr) return;
        if (!running) running = std::make_unique<Running>();
        running->spoilt.push_back(Spoilt{&watch, op, storage, watch.handles->list->size()});
      });
}

inline std::unique_ptr<at::ObserverContext> op_begins(const at::RecordFunction& function) {
  if (watching == nullptr) return nullptr;  // a thread that has got this one's callbacks
  const WatchedOp* op = watched_op(*watching->ops, function);
  if (op == nullptr) return nullptr;
  std::unique_ptr<Running> running;
  for (Watch* watch = watching; watch != nullptr; watch = watch->outer) {
    const WatchedOp* known = watch->ops == watching->ops ? op : watched_op(*watch->ops, function);
    if (known != nullptr) look(*watch, known, function, running);
    if (!op->is_composite) watch->depth++;
  }
  return running;
}

inline void op_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  if (watching == nullptr) return;
  const WatchedOp* op = watched_op(*watching->ops, function);
  if (op == nullptr || op->is_composite) return;
  for (Watch* watch = watching; watch != nullptr; watch = watch->outer) {
    if (--watch->depth > 0 || watch->expected == nullptr) continue;
    note(*watch, Reason::CHOOSES, watch->expected);  // it was not held
    watch->expected = nullptr;
  }
  if (context == nullptr) return;
  for (const Spoilt& one : static_cast<Running*>(context)->spoilt) {
    const auto& handles = *one.watch->handles->list;
    for (size_t i = one.packed; i < handles.size(); i++)
      if (handles[i] != nullptr && handles[i]->storage == reinterpret_cast<unsigned long long>(one.storage))
        note(*one.watch, Reason::SPOILS, one.op);
  }
}

// -- The types, for Python

inline PyObject* watched_ops_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* classify = nullptr;
  if (!PyArg_ParseTuple(args, "O", &classify)) return nullptr;
  auto* self = reinterpret_cast<WatchedOps*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->classify = Py_NewRef(classify);
  static uint64_t tables = 0;  // with the GIL
  self->number = ++tables;
  self->known = new std::unordered_map<const char*, std::unique_ptr<WatchedOp>>();
  return reinterpret_cast<PyObject*>(self);
}

inline int watched_ops_traverse(WatchedOps* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->classify);
  return 0;
}

inline int watched_ops_clear(WatchedOps* self) {
  Py_CLEAR(self->classify);
  return 0;
}

inline void watched_ops_dealloc(WatchedOps* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  watched_ops_clear(self);
  delete self->known;
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* watch_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *ops = nullptr, *handles = nullptr, *owner = Py_None;
  int holds = 0, compares = 0;
  if (!PyArg_ParseTuple(args, "OO|Opp", &ops, &handles, &owner, &holds, &compares)) return nullptr;
  auto* self = reinterpret_cast<Watch*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->ops = reinterpret_cast<WatchedOps*>(Py_NewRef(ops));
  self->handles = reinterpret_cast<Handles*>(Py_NewRef(handles));
  self->written = new std::unordered_set<StorageImpl*>();
  self->choices = new std::vector<Choice>();
  self->kept = new std::vector<size_t>();
  self->owner = Py_NewRef(owner);
  self->holds = static_cast<char>(holds);
  self->compares = static_cast<char>(compares);
  return reinterpret_cast<PyObject*>(self);
}

inline void forget_choices(Watch* self) {  // freeing a tensor may run Python, which may get here again
  std::vector<Choice> choices;
  choices.swap(*self->choices);
  for (const Choice& choice : choices) Py_XDECREF(choice.sums);
}

inline void watch_dealloc(Watch* self) {
  PyTypeObject* type = Py_TYPE(self);
  forget_choices(self);
  delete self->choices;
  delete self->written;
  delete self->kept;
  Py_CLEAR(self->ops);
  Py_CLEAR(self->handles);
  Py_CLEAR(self->owner);
  type->tp_free(self);
  Py_DECREF(type);
}

inline thread_local at::CallbackHandle watch_callback = 0;  // while a watch is on this thread

inline PyObject* watch_enter(Watch* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (watching == nullptr)
    watch_callback = at::addThreadLocalCallback(at::RecordFunctionCallback(op_begins, op_ends)
                                                    .needsInputs(true)
                                                    .scopes({at::RecordScope::FUNCTION}));
  Py_INCREF(self);  // for the chain
  self->outer = watching;
  watching = self;
  if (self->holds) intercept_choices(true);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* watch_exit(Watch* self, PyObject* const*, Py_ssize_t) {
  HANDLE_TH_ERRORS
  for (Watch** one = &watching; *one != nullptr; one = &(*one)->outer)
    if (*one == self) {
      *one = self->outer;
      self->outer = nullptr;
      if (watching == nullptr) at::removeCallback(watch_callback);
      if (self->holds) intercept_choices(false);
      Py_DECREF(self);
      break;
    }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// What a recomputation could not repeat: the reason, and the op's name; None if nothing was found.
inline PyObject* watch_found(Watch* self, PyObject*) {
  if (self->found == nullptr) Py_RETURN_NONE;
  return Py_BuildValue("(is)", static_cast<int>(self->reason), self->found->name.c_str());
}

inline PyObject* watch_written(Watch* self, PyObject*) {  // the addresses of the storages that ops have written to
  HANDLE_TH_ERRORS
  Owned list(checked(PyList_New(0)));
  for (StorageImpl* storage : *self->written) {
    Owned address(checked(PyLong_FromVoidPtr(storage)));
    if (PyList_Append(list.get(), address.get()) < 0) return nullptr;
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
