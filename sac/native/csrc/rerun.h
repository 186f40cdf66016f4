// The ops of a region under the rerun engine that need no Python, in both passes, and what autograd saves of them.
#pragma once

#include "decide.h"

namespace sac {

// Put what a saved call has returned in place of its arguments.
inline void serve(Ids& ids, const Site& site, const std::vector<Tensor>& saved, Stack* stack, size_t base,
                  const Signature& signature) {
  after_op(ids, site);
  stack->resize(base);
  for (const Tensor& tensor : saved) stack->emplace_back(tensor.detach());
  name_results(ids, *site.op, *stack, base, signature);
}

// Run an op of a module that is saved whole, on which no rule decides: do what `ForwardMode._run_inside` does if it
// writes to nothing. Return false if Python has to run it.
inline bool run_inside(Ids& ids, const OperatorHandle& op, Stack* stack) {
  if (!ids.runs || ids.inside == nullptr || ids.sites == nullptr) return false;
  PathSites* sites = ids.sites->at(ids.inside);
  const Site* site = sites != nullptr ? ids.sites->find(sites, &op.schema()) : nullptr;
  if (site == nullptr || site->written >= 0) return false;
  const auto is_ours = [](const IValue& value) {
    return !value.isTensor() || !value.toTensor().defined() || is_plain(value.toTensor().unsafeGetTensorImpl());
  };
  const Op& known = *site->op;
  for (size_t i = 0, base = stack->size() - known.arguments.size(); i < known.arguments.size(); i++) {
    const IValue& value = (*stack)[base + i];
    if (known.arguments[i] == Kind::PLAIN || value.isNone()) continue;
    if (value.isTensor() && !is_ours(value)) return false;
    if (value.isList())
      for (const IValue& one : value.toListRef())
        if (!is_ours(one)) return false;
  }
  op.callBoxed(stack);
  ids.recorded++;
  return true;
}

// Run one op as the region's mode does, with the mode off the stack; return false, with the arguments as they were, if
// Python has to run it.
inline bool rerun(Ids& ids, const OperatorHandle& op, Stack* stack) {
  ids.has_signature = 0;
  if (ids.is_paused) return false;
  if (ids.is_inside) return run_inside(ids, op, stack);
  Site* site = site_in(ids, op);
  const bool is_view = site != nullptr && site->memory != Memory::NEW, is_forward = ids.state != nullptr;
  const Op* known = site != nullptr ? site->op.get() : op_to_sign(op);
  if (known == nullptr) return false;
  const size_t base = stack->size() - known->arguments.size();
  if (is_view) {
    if (!ids.runs || !see(ids, *known, *stack, base)) return false;
    op.callBoxed(stack);
    ids.recorded++;
    return true;
  }
  Signature signature = signature_of(ids, *known, &op.schema(), *stack, base);
  if (!signature.is_known) return false;
  const bool is_decided = is_decided_here(ids, site), draws = site != nullptr && site->draws;
  bool is_pythons = !is_decided && (site == nullptr || !ids.runs || site->verdict != Verdict::RECOMPUTE);
  if (draws && !is_pythons)
    is_pythons = !site->is_random || is_passed_generator(*known, *stack, base) ||
                 (is_decided && is_forward && !draws_on_cpu(*known, *stack, base));
  const IValue* written = !is_pythons && site->written >= 0 ? &(*stack)[base + site->written] : nullptr;
  if (written != nullptr)
    is_pythons = !(written->isTensor() && written->toTensor().defined() && is_simple(written->toTensor()) &&
                   may_overwrite(ids, written->toTensor()));
  std::vector<IValue> arguments;  // of a forward, if the op may be saved
  if (is_decided && is_forward && !is_pythons) {
    arguments.assign(stack->begin() + static_cast<Stack::difference_type>(base), stack->end());
    is_pythons = !are_describable(op.schema(), arguments);
  } else if (!is_pythons) {
    if (is_forward)
      note_reads(ids, *known, *stack, base);
    else
      stop_before(ids, written);
  }
  const Signature signed_so = signature;  // for Python, which counts draws itself
  if (!is_pythons && (draws || (is_decided && !is_forward))) {
    Gil gil;
    std::optional<Drawn> drawn;
    if (draws) drawn.emplace(ids, *site, signature);
    std::vector<Tensor> saved;
    const Found found = is_decided && !is_forward ? find_saved(ids, *site, signature, saved) : Found::NOTHING;
    if (drawn && found != Found::PYTHON) drawn->count();
    if (found == Found::VALUE) {
      serve(ids, *site, saved, stack, base, signature);
      return true;
    }
    is_pythons = found == Found::PYTHON;
  }
  if (is_pythons) {
    ids.has_signature = 1;
    ids.is_external = signed_so.is_external;
    ids.signature = static_cast<int64_t>(signed_so.hash);
    ids.made_of = signed_so.made_of;
    return false;
  }
  Draw draw(draws && is_decided && is_forward);
  op.callBoxed(stack);
  ids.recorded++;
  if (is_decided && is_forward)
    decide(ids, *site, op, arguments, *stack, base, signature, draw.states().first.defined());
  (*ids.tables)->values[static_cast<int64_t>(signature.hash)].producer = site->object;
  name_results(ids, *site->op, *stack, base, signature);
  after_op(ids, *site);
  return true;
}

// Run a shallow copy of a tensor as the region's mode does; return nothing if Python has to.
inline c10::intrusive_ptr<TensorImpl> rerun_detach(Ids& ids, const TensorImpl* tensor) {
  if (!ids.runs || !is_plain(tensor)) return {};
  ids.has_signature = 0;
  PyObject* object = object_of(tensor);
  if (object != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) return {};
  if (ids.is_paused) return {};
  ids.recorded++;
  return tensor->shallow_copy_and_detach(c10::VariableVersion(0), true);
}

// -- What autograd saves

// The address of a tensor's storage and its value id; none if Python has to find them. With the GIL.
inline std::optional<std::pair<int64_t, int64_t>> place_of(Ids& ids, PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != THPVariableClass && type != ParameterClass) return {};
  const Tensor& tensor = THPVariable_Unpack(object);
  if (!is_simple(tensor)) return {};
  const int64_t address = address_of(storage_of(tensor.unsafeGetTensorImpl()));
  return std::pair{address, value_id_of(ids, tensor, address)};
}

// Do what `RerunRecorder.pack` does for a plain tensor; return false if Python has to do it.
inline bool pack_in_pass(PyObject* recorder, PyObject* object, Handle* handle) {
  Ids* self = rerunning;
  while (self != nullptr && self->recorder != recorder) self = self->outer;
  if (self == nullptr || self->packed == nullptr || self->is_paused) return false;
  IdTables& t = **self->tables;
  const auto place = place_of(*self, object);
  if (!place) return false;
  const auto [address, id] = *place;
  const Tensor& tensor = THPVariable_Unpack(object);
  const auto saved = t.saved.find(address);
  if (saved != t.saved.end() && version_of(tensor) > saved->second.version) return false;
  const ValueInfo* info = t.find(id);
  const bool is_persistent = t.is_persistent(info), is_external = info != nullptr && info->is_external;
  PyObject* maker = info != nullptr ? info->producer : nullptr;
  const bool has_place = maker != nullptr && !is_external && self->keeps_layouts;
  self->packed->list->push_back(Packed{id, Py_XNewRef(maker), has_place ? tensor.storage_offset() : -1,
                                       lazy_bits(tensor), self->has_rules || !is_persistent, is_external});
  handle->storage = static_cast<unsigned long long>(address);
  t.recent.push_back(address);
  if (saved == t.saved.end() && !(is_persistent && self->keeps_persistent)) return true;
  PyObject* kept = tensor.is_leaf() ? Py_NewRef(object) : checked(without_graph(tensor));
  handle->is_kept = 1;
  handle->is_external = saved == t.saved.end();
  handle->version = version_of(tensor);
  Py_XSETREF(handle->watched, Py_NewRef(kept));
  Py_XSETREF(handle->value, kept);
  return true;
}

// Whether a recomputation, with this `RecomputeMode.verify`, saves what the forward has described. False if Python has
// to find that out.
inline bool is_as_packed(PyObject* verify, Py_ssize_t index, PyObject* object) {
  Ids* self = PyMethod_Check(verify) ? ids_of(PyMethod_GET_SELF(verify)) : nullptr;
  if (self == nullptr || self->packed == nullptr || index >= packs_length(self->packed)) return false;
  const Packed& packed = (*self->packed->list)[index];
  if (!packed.is_compared) return true;
  const auto place = place_of(*self, object);
  if (!place || place->second != packed.id) return false;
  const Tensor& tensor = THPVariable_Unpack(object);
  return (packed.maker == nullptr || packed.offset < 0 || packed.offset == tensor.storage_offset()) &&
         packed.bits == lazy_bits(tensor);
}

// -- The type, for Python

inline PyObject* ids_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Ids*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->tables = new std::shared_ptr<IdTables>(std::make_shared<IdTables>());
  self->hits = new std::vector<int>();
  self->has_plain_parameters = -1;
  return reinterpret_cast<PyObject*>(self);
}

// Views of producers stay, as the signatures that a forward has seen: they need nothing else.
inline void ids_dealloc(Ids* self) {
  PyTypeObject* type = Py_TYPE(self);
  IdTables& t = **self->tables;
  t.storages = {};
  t.by_storage = {};
  delete self->tables;
  delete self->hits;
  Py_XDECREF(self->packs);
  Py_XDECREF(self->inside);
  type->tp_free(self);
  Py_DECREF(type);
}

// The views of all tables, in the order of `Table`.
inline PyObject* ids_views(Ids* self, PyObject*) {
  HANDLE_TH_ERRORS
  Owned views(checked(PyTuple_New(TABLES)));
  for (int i = 0; i < TABLES; i++) PyTuple_SET_ITEM(views.get(), i, id_view(*self->tables, static_cast<Table>(i)));
  return views.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* ids_producers(Ids* self, PyObject*) {
  HANDLE_TH_ERRORS
  return id_view(*self->tables, Table::PRODUCERS);
  END_HANDLE_TH_ERRORS
}

inline PyObject* ids_packs(Ids* self, PyObject*) {  // what autograd saves
  HANDLE_TH_ERRORS
  if (self->packs == nullptr) self->packs = new_packs();
  return Py_NewRef(self->packs);
  END_HANDLE_TH_ERRORS
}

// A plain tensor with a storage; nullptr for all else.
inline const Tensor* simple_tensor(PyObject* object) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) return nullptr;
  const Tensor& tensor = THPVariable_Unpack(object);
  return is_simple(tensor) ? &tensor : nullptr;
}

// `ValueIds.name_input`: a tensor, the value id of its position, `lasts`. Returns what is noted of its one part; None if
// Python has to name it.
inline PyObject* ids_name_input(Ids* self, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const Tensor* tensor = simple_tensor(args[0]);
  if (tensor == nullptr) Py_RETURN_NONE;
  IdTables& t = **self->tables;
  const int64_t address = address_of(storage_of(tensor->unsafeGetTensorImpl()));
  const int64_t id = t.by_storage.insert({address, key_of(args[1])}).first->second;
  ValueInfo& info = t.values[id];
  info.is_input = true;
  if (args[2] != Py_True) info.is_elsewhere = true;
  return Py_BuildValue("[(LL)]", static_cast<long long>(id), static_cast<long long>(tensor->storage_offset()));
  END_HANDLE_TH_ERRORS
}

// `ValueIds.note_saved`: a tensor. Returns the address of its storage; None if Python has to note it.
inline PyObject* ids_note_saved(Ids* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const Tensor* tensor = simple_tensor(object);
  if (tensor == nullptr) Py_RETURN_NONE;
  const int64_t address = address_of(storage_of(tensor->unsafeGetTensorImpl()));
  (*self->tables)->saved[address] = SavedStorage{version_of(*tensor)};
  return PyLong_FromLongLong(address);
  END_HANDLE_TH_ERRORS
}

// `ValueIds.name_input_again`: a tensor, what `name_input` has noted. Returns whether Python need not name it.
inline PyObject* ids_name_input_again(Ids* self, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const Tensor* tensor = simple_tensor(args[0]);
  long long id = 0, offset = 0;
  if (tensor == nullptr || !PyList_Check(args[1]) || PyList_GET_SIZE(args[1]) != 1) Py_RETURN_FALSE;
  if (!PyArg_ParseTuple(PyList_GET_ITEM(args[1], 0), "LL", &id, &offset)) return nullptr;
  IdTables& t = **self->tables;
  StorageImpl* storage = storage_of(tensor->unsafeGetTensorImpl());
  t.by_storage[address_of(storage)] = id;
  t.values[id].is_input = true;
  if (offset != tensor->storage_offset()) {
    t.moved[address_of(storage)] = offset - tensor->storage_offset();
    t.watch(storage);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// Borrow a dictionary that is an attribute.
inline bool borrow(PyObject* object, PyObject* name, PyObject*& found) {
  found = PyObject_GetAttr(object, name);
  if (found == nullptr) return false;
  Py_DECREF(found);
  if (PyDict_Check(found)) return true;
  PyErr_SetString(PyExc_TypeError, "expected a dictionary");
  return false;
}

// The mode is on the stack now. Arguments: mode, value ids, state or None, whether ordinary ops run here, sites. Of a
// forward also the recorder, whether there are rules, `keeps_layouts`, `keeps_persistent`, whether everything is saved,
// and the `SavedModules`, if modules are saved whole, or None. Of a recomputation also what the forward has packed, and what is held.
inline PyObject* ids_enter(Ids* self, PyObject* const* args, Py_ssize_t) {
  self->mode = args[0];
  self->owner = args[1];
  self->state = args[2] != Py_None ? args[2] : nullptr;
  self->runs = args[3] == Py_True;
  self->sites = reinterpret_cast<Sites*>(args[4]);
  self->path = nullptr;
  self->path_sites = nullptr;
  self->recorder = self->held = nullptr;
  self->packed = nullptr;
  self->progress = nullptr;
  self->has_modules = self->may_save = 0;
  (*self->tables)->owned.emplace_back(Py_NewRef(args[4]));  // has the call sites
  if (self->state == nullptr) {
    if (PyObject_TypeCheck(args[5], PacksType)) self->packed = reinterpret_cast<Packs*>(args[5]);
    self->held = args[6];
    if (!borrow(self->mode, names().waiting, self->waiting) || !borrow(self->mode, names().calls, self->calls) ||
        !borrow(self->mode, names().occurrences, self->occurrences) ||
        !borrow(self->mode, names().seen, self->known) || !borrow(self->mode, names().fetched, self->fetched))
      return nullptr;
    Owned progress(PyObject_GetAttr(self->mode, names().progress));  // the mode holds it
    if (!progress) return nullptr;
    if (PyObject_TypeCheck(progress.get(), ProgressType)) self->progress = reinterpret_cast<Progress*>(progress.get());
  } else {
    if (!borrow(self->state, names().calls, self->calls) ||
        !borrow(self->state, names().occurrences, self->occurrences) ||
        !borrow(self->state, names().alternations, self->alternations) ||
        !borrow(self->state, names().by_storage, self->by_storage))
      return nullptr;
    self->recorder = args[5];
    self->has_rules = args[6] == Py_True;
    self->keeps_layouts = args[7] == Py_True;
    self->keeps_persistent = args[8] == Py_True;
    if (args[9] != Py_True) self->packed = reinterpret_cast<Packs*>(self->packs);
    if (args[10] != Py_None) {
      if (!borrow(args[10], names().keepers, self->keepers)) return nullptr;
      Owned reached(PyObject_GetAttr(args[10], names().reached));  // which holds it
      if (!reached) return nullptr;
      self->reached = reached.get();
      self->has_modules = 1;
    }
  }
  self->outer = rerunning;
  rerunning = self;
  Py_RETURN_NONE;
}

inline PyObject* ids_leave(Ids* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (self->state != nullptr && self->may_save && PyObject_SetAttr(self->state, names().may_save, Py_True) < 0)
    throw python_error();
  if (self->state != nullptr && !self->hits->empty()) {
    Owned hits(checked(PyObject_GetAttr(self->state, names().hits)));
    for (size_t i = 0; i < self->hits->size(); i++) {
      if ((*self->hits)[i] == 0) continue;
      Owned rule(checked(PyLong_FromSize_t(i)));
      Owned before(checked(PyObject_GetItem(hits.get(), rule.get())));
      Owned now(checked(PyLong_FromLongLong(key_of(before.get()) + (*self->hits)[i])));
      if (PyObject_SetItem(hits.get(), rule.get(), now.get()) < 0) throw python_error();
    }
    self->hits->clear();
  }
  for (Ids** one = &rerunning; *one != nullptr; one = &(*one)->outer)
    if (*one == self) {
      *one = self->outer;
      break;
    }
  self->outer = nullptr;
  self->mode = self->owner = self->state = self->recorder = nullptr;
  self->held = nullptr;
  self->packed = nullptr;
  self->progress = nullptr;
  self->sites = nullptr;
  self->has_signature = 0;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The signature of the op that Python runs now, whether something external went into it, and its `made_of`; None if
// Python has to hash it.
inline PyObject* ids_take(Ids* self, PyObject*) {
  if (!self->has_signature) Py_RETURN_NONE;
  self->has_signature = 0;
  return Py_BuildValue("(LOL)", static_cast<long long>(self->signature), self->is_external ? Py_True : Py_False,
                       static_cast<long long>(self->made_of));
}

inline PyObject* ids_forget(Ids* self, PyObject*) {  // an op comes that did not pass through the library
  self->has_signature = 0;
  Py_RETURN_NONE;
}

inline PyMemberDef ids_members[] = {
    {"is_paused", T_BOOL, offsetof(Ids, is_paused), 0, nullptr},
    {"is_inside", T_BOOL, offsetof(Ids, is_inside), 0, nullptr},
    {"inside", T_OBJECT, offsetof(Ids, inside), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

inline PyObject* ids_recorded(Ids* self, void*) { return PyLong_FromLongLong(self->recorded); }

inline PyGetSetDef ids_getset[] = {
    {"recorded", reinterpret_cast<getter>(ids_recorded), nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace sac
