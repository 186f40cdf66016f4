// The ordinary ops of a region under the rerun engine, in both passes; see Note [Value ids] in
// sac/recompute/value_ids.py.
//
// What is known of a pass is in Python's tables, which Python uses for all other ops. An op's signature is hashed here
// for both, so that a call has one signature whichever of the two runs it.
#pragma once

#include "handles.h"
#include "record.h"

namespace sac {

// The value ids of one pass over one region.
struct Ids {
  PyObject_HEAD
  PyObject* by_storage;           // address of a storage -> value id
  PyObject* moved;                // address -> how much larger its offset was in forward
  PyObject* external;             // value ids
  PyObject* parameters;           // value ids
  PyObject* parameter_addresses;
  PyObject* producers;            // value id -> call site
  PyObject* parameter_bytes;      // value id -> what `ParameterOnlyIds.of` returns for it
  PyObject* references;           // weak references to storages
  PyObject* inputs;               // value ids
  PyObject* elsewhere;            // value ids of inputs that the region does not hold as they are
  int64_t recorded;               // ops run here
  // Of the op that Python is about to run.
  char has_signature;
  char is_external;
  int64_t signature;
  int64_t made_of;
  // While its mode is on the stack: borrowed from the mode.
  Ids* outer;
  PyObject* mode;
  PyObject* owner;     // Python's `ValueIds`
  PyObject* state;     // of a forward: the `RerunState`; nullptr in a recomputation
  PyObject* recorder;  // of a forward: the one that packs
  PyObject* saved;     // of a forward: its `by_storage`
  PyObject* packed;    // of a forward: what autograd has saved since the last op
  PyObject* packs;     // all that autograd has saved in forward, as `RerunState.packed` describes it
  PyObject* held;      // of a recomputation: the addresses of what is served without a copy
  char has_modules;    // of a forward: whether modules are saved whole
  char has_rules;      // of a forward: whether inputs and parameters are compared, too
  char keeps_layouts;
  char keeps_persistent;
  PyObject* hits;      // of a forward: by rule
  char runs;           // ordinary ops run here; otherwise they are only signed
  Sites* sites;
  PyObject* path;
  PathSites* path_sites;
};

inline PyTypeObject* ProgressType = nullptr;
inline bool note_op(PyObject* progress);  // see fill.h

inline thread_local Ids* rerunning = nullptr;  // of the innermost such mode on this thread's stack

inline Ids* ids_of(PyObject* mode) {
  for (Ids* ids = rerunning; ids != nullptr; ids = ids->outer)
    if (ids->mode == mode) return ids;
  return nullptr;
}

struct Signature {
  uint64_t hash = 0x9E3779B97F4A7C15ull;
  bool is_known = true;  // false if Python has to hash an argument
  bool is_external = false;
  int64_t made_of = 0;

  void add(uint64_t value) {
    hash ^= value + 0x9E3779B97F4A7C15ull + (hash << 6) + (hash >> 2);
    hash *= 0xFF51AFD7ED558CCDull;
    hash ^= hash >> 33;
  }

  void add(const IValue& value) {
    add(static_cast<uint64_t>(value.isNone() ? 1 : value.isInt() ? 2 : value.isDouble() ? 3 : value.isBool() ? 4 : 5));
    if (value.isNone()) return;
    if (value.isInt()) return add(static_cast<uint64_t>(value.toInt()));
    if (value.isBool()) return add(static_cast<uint64_t>(value.toBool()));
    if (value.isDouble()) return add_double(value.toDouble());
    if (value.isComplexDouble()) {
      add_double(value.toComplexDouble().real());
      return add_double(value.toComplexDouble().imag());
    }
    if (value.isString()) return add(std::hash<std::string>()(value.toStringRef()));
    if (value.isDevice()) return add(std::hash<c10::Device>()(value.toDevice()));
    if (value.isGenerator()) return;
    if (!value.isList() || value.isTensorList()) {
      is_known = false;
      return;
    }
    const auto list = value.toListRef();
    add(list.size());
    for (const IValue& one : list) add(one);
  }

  void add_double(double value) {
    if (value == 0) value = 0;  // -0.0 is equal
    uint64_t bits = 0;
    if (value == value) memcpy(&bits, &value, sizeof bits);
    add(value == value ? bits : 6);
  }
};

inline PyObject* found_in(PyObject* dict, PyObject* key) {  // borrowed; nullptr if it is not there
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw python_error();
  return found;
}

inline bool holds(PyObject* set, PyObject* key) {
  const int found = PySet_Contains(set, key);
  if (found < 0) throw python_error();
  return found == 1;
}

// Names of attributes, as Python's own code has them.
struct Names {
  PyObject* paused = PyUnicode_InternFromString("paused");
  PyObject* inside = PyUnicode_InternFromString("inside");
  PyObject* progress = PyUnicode_InternFromString("progress");
  PyObject* done = PyUnicode_InternFromString("done");
  PyObject* after_op = PyUnicode_InternFromString("after_op");
  PyObject* of = PyUnicode_InternFromString("of");
  PyObject* note_reads = PyUnicode_InternFromString("note_reads");
  PyObject* keep_saved = PyUnicode_InternFromString("keep_saved");
  PyObject* parameter = PyUnicode_InternFromString("parameter");
};

inline const Names& names() {
  static const auto* all = new Names();
  return *all;
}

inline bool is_set(PyObject* object, PyObject* attribute) {  // neither None nor False
  Owned found(checked(PyObject_GetAttr(object, attribute)));
  return found.get() != Py_None && found.get() != Py_False;
}

// The value id of a tensor as Python finds it, which names the tensor if it is new to the region.
inline PyObject* ask_value_id(Ids& ids, const Tensor& tensor) {
  Owned wrapped(checked(THPVariable_Wrap(tensor)));
  return checked(PyObject_CallMethodOneArg(ids.owner, names().of, wrapped.get()));
}

// Whether the library has nothing to find out about a tensor: it is strided, and of no subclass with code of its own.
inline bool is_simple(const Tensor& tensor) {
  const TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return is_plain(impl) && impl->layout() == at::kStrided && storage_of(impl) != nullptr &&
         !impl->has_symbolic_sizes_strides();
}

inline void add_to(PyObject* set, PyObject* key) {
  if (PySet_Add(set, key) < 0) throw python_error();
}

inline void set_in(PyObject* dict, PyObject* key, PyObject* value) {
  if (PyDict_SetItem(dict, key, value) < 0) throw python_error();
}

// Do what `ValueIds._name_parameter` does for an instance of `Parameter` itself.
inline PyObject* name_parameter(Ids& ids, const Tensor& tensor, PyObject* address) {
  Owned identity(checked(PyLong_FromVoidPtr(object_of(tensor.unsafeGetTensorImpl()))));
  Owned pair(checked(PyTuple_Pack(2, names().parameter, identity.get())));
  Owned id(checked(PyLong_FromSsize_t(PyObject_Hash(pair.get()))));
  Owned bytes(checked(PyLong_FromLongLong(tensor.numel() * static_cast<int64_t>(tensor.element_size()))));
  set_in(ids.by_storage, address, id.get());
  set_in(ids.parameter_bytes, id.get(), bytes.get());
  add_to(ids.parameters, id.get());
  add_to(ids.parameter_addresses, address);
  return Py_NewRef(id.get());
}

inline PyObject* value_id_of(Ids& ids, const Tensor& tensor, PyObject* address) {
  const TensorImpl* impl = tensor.unsafeGetTensorImpl();
  PyObject* found = found_in(ids.by_storage, address);
  if (found == nullptr) return is_parameter(impl) ? name_parameter(ids, tensor, address) : ask_value_id(ids, tensor);
  if (is_parameter(impl) && !(holds(ids.parameter_addresses, address) && holds(ids.parameters, found)))
    return ask_value_id(ids, tensor);
  return Py_NewRef(found);
}

// What `lazy_bits` in sac/tensors.py returns.
inline int lazy_bits(const Tensor& tensor) { return (tensor.is_conj() ? 1 : 0) + (tensor.is_neg() ? 2 : 0); }

inline void add_tensor(Ids& ids, const Tensor& tensor, Signature& signature) {
  if (!tensor.defined()) return signature.add(IValue());
  if (is_number(tensor)) return signature.add(IValue(number_in(tensor)));
  if (!is_simple(tensor)) {
    signature.is_known = false;
    return;
  }
  Owned address(checked(PyLong_FromVoidPtr(storage_of(tensor.unsafeGetTensorImpl()))));
  Owned id(value_id_of(ids, tensor, address.get()));
  signature.add(static_cast<uint64_t>(PyObject_Hash(id.get())));
  signature.add(7 + static_cast<uint64_t>(tensor.dim()));
  for (const int64_t size : tensor.sizes()) signature.add(static_cast<uint64_t>(size));
  for (const int64_t stride : tensor.strides()) signature.add(static_cast<uint64_t>(stride));
  int64_t offset = tensor.storage_offset();
  if (PyDict_GET_SIZE(ids.moved) > 0)
    if (PyObject* by = found_in(ids.moved, address.get())) offset += PyLong_AsLongLong(by);
  signature.add(static_cast<uint64_t>(offset));
  signature.add(static_cast<uint64_t>(tensor.scalar_type()));
  if (const int bits = lazy_bits(tensor)) signature.add(static_cast<uint64_t>(bits));
  signature.is_external = signature.is_external || holds(ids.external, id.get());
  if (signature.made_of < 0) return;
  PyObject* bytes = found_in(ids.parameter_bytes, id.get());
  signature.made_of = bytes == nullptr ? -1 : std::max<int64_t>(signature.made_of, PyLong_AsLongLong(bytes));
}

inline Signature signature_of(Ids& ids, const Op& op, const void* schema, const Stack& stack, size_t base) {
  Signature signature;
  signature.add(reinterpret_cast<uint64_t>(schema));
  for (size_t i = 0; i < op.arguments.size() && signature.is_known; i++) {
    const IValue& argument = stack[base + i];
    if (op.arguments[i] == Kind::PLAIN) {
      signature.add(argument);
    } else if (argument.isTensor()) {
      add_tensor(ids, argument.toTensor(), signature);
    } else if (argument.isNone()) {
      signature.add(argument);
    } else {
      const auto list = argument.toListRef();
      signature.add(list.size());
      for (const IValue& one : list) {
        if (one.isTensor())
          add_tensor(ids, one.toTensor(), signature);
        else
          signature.add(one);
      }
    }
  }
  signature.hash &= (1ull << 60) - 1;  // Python's hash of it is itself
  return signature;
}

// Every op of torch's own that Python may want signed. With the GIL.
inline const Op* op_to_sign(const OperatorHandle& handle) {
  static auto* known = new std::unordered_map<const void*, std::unique_ptr<Op>>();
  const auto& schema = handle.schema();
  auto& found = (*known)[&schema];
  if (!found) found = std::make_unique<Op>(handle);
  const std::string& name = schema.name();
  const bool is_torchs = name.rfind("aten::", 0) == 0 || name.rfind("prims::", 0) == 0;
  return is_torchs ? found.get() : nullptr;
}

// Name a parameter before a view is made of it; return false if Python has to do it.
inline bool see(Ids& ids, const Op& op, const Stack& stack, size_t base) {
  if (op.arguments.empty() || op.arguments[0] != Kind::TENSOR || !stack[base].isTensor()) return false;
  const Tensor& tensor = stack[base].toTensor();
  if (!tensor.defined() || !is_simple(tensor)) return false;
  PyObject* object = object_of(tensor.unsafeGetTensorImpl());
  if (object == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass) return true;
  Owned address(checked(PyLong_FromVoidPtr(storage_of(tensor.unsafeGetTensorImpl()))));
  if (!is_parameter(tensor.unsafeGetTensorImpl())) return false;
  Owned id(value_id_of(ids, tensor, address.get()));
  return true;
}

// Let Python note that an op reads what the region saves.
inline void note_reads(Ids& ids, const Op& op, const Stack& stack, size_t base) {
  if (PyDict_GET_SIZE(ids.saved) == 0) return;
  const auto note = [&](const IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    const Tensor& tensor = value.toTensor();
    if (StorageImpl* storage = storage_of(tensor.unsafeGetTensorImpl())) {
      Owned address(checked(PyLong_FromVoidPtr(storage)));
      if (found_in(ids.saved, address.get()) == nullptr) return;
    }
    Owned wrapped(checked(THPVariable_Wrap(tensor)));
    Owned args(checked(PyTuple_Pack(1, wrapped.get())));
    Owned done(checked(PyObject_CallMethodOneArg(ids.state, names().note_reads, args.get())));
  };
  for (size_t i = 0; i < op.arguments.size(); i++) {
    const IValue& argument = stack[base + i];
    if (op.arguments[i] == Kind::PLAIN || argument.isNone()) continue;
    if (argument.isTensor()) {
      note(argument);
    } else {
      for (const IValue& one : argument.toListRef()) note(one);
    }
  }
}

inline void name_result(Ids& ids, const Tensor& tensor, PyObject* id, const Signature& signature) {
  StorageImpl* storage = storage_of(tensor.unsafeGetTensorImpl());
  Owned address(checked(PyLong_FromVoidPtr(storage)));
  if (found_in(ids.by_storage, address.get()) == nullptr) {
    Owned weak(checked(PyLong_FromVoidPtr(c10::raw::intrusive_ptr::make_weak(storage))));
    if (PyList_Append(ids.references, weak.get()) < 0) throw python_error();
  }
  set_in(ids.by_storage, address.get(), id);
  if (signature.is_external) add_to(ids.external, id);
  if (signature.made_of < 0) return;
  Owned bytes(checked(PyLong_FromLongLong(signature.made_of)));
  set_in(ids.parameter_bytes, id, bytes.get());
}

// Do what `ValueIds.name_output` does.
inline void name_results(Ids& ids, const Op& op, const Stack& stack, size_t base, PyObject* id,
                         const Signature& signature) {
  if (op.returns_one_tensor && stack[base].toTensor().defined() && is_simple(stack[base].toTensor()))
    return name_result(ids, stack[base].toTensor(), id, signature);
  bool are_simple = !op.returns_one_tensor;
  for (size_t i = 0; i < op.results.size() && are_simple; i++) {
    const IValue& value = stack[base + i];
    are_simple = op.results[i] == Kind::TENSOR && (!value.toTensor().defined() || is_simple(value.toTensor()));
  }
  if (!are_simple) {
    Owned out(checked(wrapped(op, stack, base)));
    Owned done(checked(PyObject_CallMethod(ids.owner, "name_output", "OOOL", out.get(), id,
                                                 signature.is_external ? Py_True : Py_False,
                                                 static_cast<long long>(signature.made_of))));
    return;
  }
  for (size_t i = 0; i < op.results.size(); i++) {
    const Tensor& tensor = stack[base + i].toTensor();
    if (!tensor.defined()) continue;
    Owned pair(checked(Py_BuildValue("(On)", id, static_cast<Py_ssize_t>(i))));
    Owned part(checked(PyLong_FromSsize_t(PyObject_Hash(pair.get()))));
    name_result(ids, tensor, part.get(), signature);
  }
}

inline void after_op(Ids& ids, const Site& site) {
  if (ids.state == nullptr) {
    Owned progress(checked(PyObject_GetAttr(ids.mode, names().progress)));
    if (!note_op(progress.get())) Owned(checked(PyObject_CallMethodNoArgs(progress.get(), names().after_op)));
    return;
  }
  if (PyList_GET_SIZE(ids.packed) > 0 && PyList_SetSlice(ids.packed, 0, PyList_GET_SIZE(ids.packed), nullptr) < 0)
    throw python_error();
  if (site.rule < 0) return;
  Owned rule(checked(PyLong_FromLong(site.rule)));
  PyObject* hits = found_in(ids.hits, rule.get());
  Owned now(checked(PyLong_FromLong(hits != nullptr ? PyLong_AsLong(hits) + 1 : 1)));
  set_in(ids.hits, rule.get(), now.get());
}

inline Site* site_in(Ids& ids, const OperatorHandle& op) {
  PyObject* path = reinterpret_cast<Mode*>(ids.mode)->sites;
  if (path != ids.path || ids.path_sites == nullptr) {
    ids.path = path;
    ids.path_sites = ids.sites->at(path);
  }
  return ids.path_sites != nullptr ? ids.sites->find(ids.path_sites, &op.schema()) : nullptr;
}

// Whether ops are not the region's own now: a recomputation runs inside of the forward, or a module that is saved whole.
inline bool is_pythons_turn(Ids& ids) {
  return ids.state != nullptr && (is_set(ids.state, names().paused) || is_set(ids.state, names().inside));
}

// Whether nobody needs what the op is about to overwrite: an op of this pass has made the tensor, it is not saved, and
// autograd has not saved it since the last op. For all other tensors see `RerunState.before_write`, and
// `RecomputeMode._check_write`.
inline bool may_overwrite(Ids& ids, const Tensor& tensor) {
  if (ids.has_modules) return false;
  Owned address(checked(PyLong_FromVoidPtr(storage_of(tensor.unsafeGetTensorImpl()))));
  PyObject* id = found_in(ids.by_storage, address.get());
  if (id == nullptr || holds(ids.parameters, id) || holds(ids.inputs, id)) return false;
  if (ids.state == nullptr) return !holds(ids.held, address.get());
  if (found_in(ids.saved, address.get()) != nullptr) return false;
  const auto* storage = storage_of(tensor.unsafeGetTensorImpl());
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ids.packed); i++) {
    PyObject* one = PyList_GET_ITEM(ids.packed, i);
    if (!PyObject_TypeCheck(one, HandleType)) return false;
    if (reinterpret_cast<Handle*>(one)->storage == reinterpret_cast<unsigned long long>(storage)) return false;
  }
  return true;
}

// Run one op as the region's mode does; return false, with the stack as it was, if Python has to run it.
inline bool rerun(Ids& ids, const OperatorHandle& op, Stack* stack) {
  Site* site = nullptr;
  Signature signature;
  bool is_view = false;
  size_t base = 0;
  torch::torch_dispatch_mode::StashTorchDispatchModeGuard stash;  // what Python runs in here is no op of the region
  {
    Gil gil;
    ids.has_signature = 0;
    if (is_pythons_turn(ids)) return false;
    site = site_in(ids, op);
    is_view = site != nullptr && site->memory != Memory::NEW;
    const Op* known = site != nullptr ? site->op.get() : op_to_sign(op);
    if (known == nullptr) return false;
    base = stack->size() - known->arguments.size();
    if (is_view) {
      if (!ids.runs || !see(ids, *known, *stack, base)) return false;
    } else {
      signature = signature_of(ids, *known, &op.schema(), *stack, base);
      if (!signature.is_known) return false;
      const bool is_ordinary = site != nullptr && ids.runs && site->verdict == Verdict::RECOMPUTE && !site->draws;
      bool is_pythons = !is_ordinary;
      if (!is_pythons && site->written >= 0) {
        const IValue& written = (*stack)[base + site->written];
        is_pythons = !(written.isTensor() && written.toTensor().defined() && is_simple(written.toTensor()) &&
                       may_overwrite(ids, written.toTensor()));
      }
      if (!is_pythons && ids.state != nullptr) note_reads(ids, *known, *stack, base);
      if (!is_pythons && ids.state == nullptr) {
        Owned progress(checked(PyObject_GetAttr(ids.mode, names().progress)));
        is_pythons = is_set(progress.get(), names().done);
      }
      if (is_pythons) {
        ids.has_signature = 1;
        ids.is_external = signature.is_external;
        ids.signature = static_cast<int64_t>(signature.hash);
        ids.made_of = signature.made_of;
        return false;
      }
    }
  }
  op.callBoxed(stack);
  ids.recorded++;
  if (is_view) return true;
  Gil gil;
  Owned id(checked(PyLong_FromLongLong(static_cast<int64_t>(signature.hash))));
  set_in(ids.producers, id.get(), site->object);
  name_results(ids, *site->op, *stack, base, id.get(), signature);
  after_op(ids, *site);
  return true;
}

// Run a shallow copy of a tensor as the region's mode does; return nothing if Python has to.
inline c10::intrusive_ptr<TensorImpl> rerun_detach(Ids& ids, const TensorImpl* tensor) {
  if (!ids.runs || !is_plain(tensor)) return {};
  {
    Gil gil;
    ids.has_signature = 0;
    PyObject* object = object_of(tensor);
    if (object != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) return {};
    if (is_pythons_turn(ids)) return {};
  }
  torch::torch_dispatch_mode::StashTorchDispatchModeGuard stash;
  ids.recorded++;
  return tensor->shallow_copy_and_detach(c10::VariableVersion(0), true);
}

// -- What autograd saves

// The address of a tensor's storage and its value id; none if Python has to find them.
inline std::pair<Owned, Owned> place_of(Ids& ids, PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != THPVariableClass && type != ParameterClass) return {};
  const Tensor& tensor = THPVariable_Unpack(object);
  if (!is_simple(tensor)) return {};
  Owned address(checked(PyLong_FromVoidPtr(storage_of(tensor.unsafeGetTensorImpl()))));
  PyObject* found = found_in(ids.by_storage, address.get());
  if (found == nullptr) return {};
  if (type == ParameterClass && !(holds(ids.parameter_addresses, address.get()) && holds(ids.parameters, found)))
    return {};
  Owned id(Py_NewRef(found));
  return {std::move(address), std::move(id)};
}

// Do what `RerunRecorder.pack` does for a plain tensor; return false if Python has to do it.
inline bool pack_in_pass(PyObject* recorder, PyObject* object, Handle* handle) {
  Ids* self = rerunning;
  while (self != nullptr && self->recorder != recorder) self = self->outer;
  if (self == nullptr || self->packs == nullptr || is_set(self->state, names().paused)) return false;
  auto* made = reinterpret_cast<PyObject*>(handle);
  auto [address, id] = place_of(*self, object);
  if (id.get() == nullptr) return false;
  const Tensor& tensor = THPVariable_Unpack(object);
  const bool is_persistent = holds(self->parameters, id.get()) ||
                             (holds(self->inputs, id.get()) && !holds(self->elsewhere, id.get()));
  const bool is_external = holds(self->external, id.get());
  PyObject* maker = found_in(self->producers, id.get());
  const bool has_place = maker != nullptr && !is_external && self->keeps_layouts;
  Owned description(checked(Py_BuildValue("(OOOLi)", self->has_rules || !is_persistent ? id.get() : Py_None,
                                          is_external ? Py_True : Py_False, maker != nullptr ? maker : Py_None,
                                          has_place ? static_cast<long long>(tensor.storage_offset()) : -1ll,
                                          lazy_bits(tensor))));
  handle->storage = PyLong_AsUnsignedLongLong(address.get());
  if (PyList_Append(self->packs, description.get()) < 0 || PyList_Append(self->packed, made) < 0) throw python_error();
  if (found_in(self->saved, address.get()) != nullptr) {
    Owned is_persistents(Py_NewRef(is_persistent ? Py_True : Py_False));
    Owned done(checked(PyObject_CallMethodObjArgs(self->state, names().keep_saved, object, made,
                                                  is_persistents.get(), nullptr)));
  } else if (is_persistent && self->keeps_persistent) {
    PyObject* kept = tensor.is_leaf() ? Py_NewRef(object) : checked(without_graph(tensor));
    handle->is_kept = handle->is_external = 1;
    handle->version = tensor.is_inference() ? 0 : tensor._version();
    Py_XSETREF(handle->watched, Py_NewRef(kept));
    Py_XSETREF(handle->value, kept);
  }
  return true;
}

// Whether a recomputation, with this `RecomputeMode.verify`, saves what the forward has described so: value id, whether
// it is external, maker, offset, lazy bits. False if Python has to find that out.
inline bool is_as_packed(PyObject* verify, Py_ssize_t index, PyObject* object) {
  Ids* self = PyMethod_Check(verify) ? ids_of(PyMethod_GET_SELF(verify)) : nullptr;
  if (self == nullptr || self->packs == nullptr || index >= PyList_GET_SIZE(self->packs)) return false;
  PyObject* description = PyList_GET_ITEM(self->packs, index);
  if (PyTuple_GET_ITEM(description, 0) == Py_None) return true;
  auto [address, id] = place_of(*self, object);
  if (id.get() == nullptr || PyObject_RichCompareBool(PyTuple_GET_ITEM(description, 0), id.get(), Py_EQ) != 1)
    return false;
  const long long offset = PyLong_AsLongLong(PyTuple_GET_ITEM(description, 3));
  const Tensor& tensor = THPVariable_Unpack(object);
  return (PyTuple_GET_ITEM(description, 2) == Py_None || offset < 0 || offset == tensor.storage_offset()) &&
         PyLong_AsLong(PyTuple_GET_ITEM(description, 4)) == lazy_bits(tensor);
}

// -- The type, for Python

inline PyObject** ids_fields(Ids* self) { return &self->by_storage; }

constexpr int IDS_FIELDS = 10;

inline PyObject* ids_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* given[IDS_FIELDS];
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O!O!O!", &PyDict_Type, &given[0], &PyDict_Type, &given[1], &PySet_Type,
                        &given[2], &PySet_Type, &given[3], &PySet_Type, &given[4], &PyDict_Type, &given[5],
                        &PyDict_Type, &given[6], &PyList_Type, &given[7], &PySet_Type, &given[8],
                        &PySet_Type, &given[9]))
    return nullptr;
  auto* self = reinterpret_cast<Ids*>(type->tp_alloc(type, 0));
  for (int i = 0; self != nullptr && i < IDS_FIELDS; i++) ids_fields(self)[i] = Py_NewRef(given[i]);
  return reinterpret_cast<PyObject*>(self);
}

inline int ids_traverse(Ids* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (int i = 0; i < IDS_FIELDS; i++) Py_VISIT(ids_fields(self)[i]);
  return 0;
}

inline int ids_clear(Ids* self) {
  for (int i = 0; i < IDS_FIELDS; i++) Py_CLEAR(ids_fields(self)[i]);
  return 0;
}

inline void ids_dealloc(Ids* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  ids_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// The mode is on the stack now. Arguments: mode, value ids, state or None, whether ordinary ops run here, sites. Of a
// forward also the recorder, whether there are rules, `keeps_layouts`, `keeps_persistent`, whether everything is saved,
// and whether modules are saved whole. Of a recomputation also what the forward has packed, and what is held.
inline PyObject* ids_enter(Ids* self, PyObject* const* args, Py_ssize_t) {
  self->mode = args[0];
  self->owner = args[1];
  self->state = args[2] != Py_None ? args[2] : nullptr;
  self->runs = args[3] == Py_True;
  self->sites = reinterpret_cast<Sites*>(args[4]);
  self->path = nullptr;
  self->path_sites = nullptr;
  self->recorder = self->saved = self->packed = self->packs = self->hits = self->held = nullptr;
  self->has_modules = 0;
  if (self->state == nullptr) {
    self->packs = args[5];
    self->held = args[6];
  } else {
    const std::pair<const char*, PyObject**> held[] = {{"by_storage", &self->saved},
                                                       {"_packed_since_op", &self->packed},
                                                       {"packed", &self->packs},
                                                       {"hits", &self->hits}};
    for (const auto& [name, field] : held) {
      *field = PyObject_GetAttrString(self->state, name);
      if (*field == nullptr) return nullptr;
      Py_DECREF(*field);  // the state holds it
    }
    self->recorder = args[5];
    self->has_rules = args[6] == Py_True;
    self->keeps_layouts = args[7] == Py_True;
    self->keeps_persistent = args[8] == Py_True;
    if (args[9] == Py_True) self->packs = nullptr;
    self->has_modules = args[10] == Py_True;
  }
  self->outer = rerunning;
  rerunning = self;
  Py_RETURN_NONE;
}

inline PyObject* ids_leave(Ids* self, PyObject*) {
  for (Ids** one = &rerunning; *one != nullptr; one = &(*one)->outer)
    if (*one == self) {
      *one = self->outer;
      break;
    }
  self->outer = nullptr;
  self->mode = self->owner = self->state = self->recorder = nullptr;
  self->saved = self->packed = self->packs = self->hits = self->held = nullptr;
  self->sites = nullptr;
  self->has_signature = 0;
  Py_RETURN_NONE;
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

inline PyObject* ids_recorded(Ids* self, void*) { return PyLong_FromLongLong(self->recorded); }

inline PyGetSetDef ids_getset[] = {
    {"recorded", reinterpret_cast<getter>(ids_recorded), nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace sac
