// The value ids of one pass over one region under the rerun engine; see Note [Value ids] in sac/recompute/value_ids.py.
//
// What is known of a pass is in the tables of value_ids.h, which Python uses for all other ops. An op's signature is
// hashed here for both, so that a call has one signature whichever of the two runs it. An ordinary op runs without the
// GIL, but for parameters and other tensors that are new to the pass.
#pragma once

#include "handles.h"
#include "record.h"
#include "value_ids.h"

namespace sac {

struct Progress;

// The value ids of one pass over one region.
struct Ids {
  PyObject_HEAD
  std::shared_ptr<IdTables>* tables;
  PyObject* packs;                // all that autograd has saved in forward, see `Packs`
  int64_t recorded;               // ops run here
  signed char has_plain_parameters;  // -1 if that is not known yet
  // Of the op that Python is about to run.
  char has_signature;
  char is_external;
  int64_t signature;
  int64_t made_of;
  // Whether ops are not the region's own now: a recomputation runs inside of the forward, or a module that is saved whole.
  char is_paused;
  char is_inside;
  PyObject* inside;  // the call sites of that module's ops
  // While its mode is on the stack: borrowed from the mode.
  Ids* outer;
  PyObject* mode;
  PyObject* owner;     // Python's `ValueIds`
  PyObject* state;     // of a forward: the `RerunState`; nullptr in a recomputation
  PyObject* recorder;  // of a forward: the one that packs
  Packs* packed;       // what autograd has saved in forward; nullptr if Python describes it
  PyObject* calls;        // of the mode or state, as are those below: counts by call site
  PyObject* occurrences;  // by signature
  PyObject* alternations;  // of a forward: by rule
  PyObject* by_storage;    // of a forward: saved values by address of a storage
  PyObject* waiting;   // of a recomputation: saved values by signature and occurrence
  PyObject* known;     // of a recomputation: the forward's `occurrences`
  PyObject* fetched;   // of a recomputation: what an outer region has recomputed
  PyObject* held;      // of a recomputation: the addresses of what is served without a copy
  Progress* progress;  // of a recomputation; nullptr if Python has to ask it
  char may_save;       // of a forward: an op has run that may be saved
  char has_modules;    // of a forward: whether modules are saved whole; then also the two attributes of `SavedModules`
  PyObject* keepers;
  PyObject* reached;
  char has_rules;      // of a forward: whether inputs and parameters are compared, too
  char keeps_layouts;
  char keeps_persistent;
  std::vector<int>* hits;  // of a forward: by rule
  char runs;           // ordinary ops run here; otherwise they are only signed
  Sites* sites;
  PyObject* path;
  PathSites* path_sites;
};

inline PyTypeObject* ProgressType = nullptr;
inline void note_op(Progress& progress);  // see fill.h
inline bool is_done(const Progress& progress);
inline std::optional<bool> may_stop(Progress& progress, const IValue* written);
inline bool pass_on(PyObject* progress);  // see late.h

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
    uint64_t bits = 0;
    if (value == value) memcpy(&bits, &value, sizeof bits);
    add(value == value ? bits : 6);
  }
};

inline bool holds(PyObject* set, PyObject* key) {
  const int found = PySet_Contains(set, key);
  if (found < 0) throw python_error();
  return found == 1;
}

// Names of attributes, as Python's own code has them.
struct Names {
  PyObject* progress = PyUnicode_InternFromString("progress");
  PyObject* done = PyUnicode_InternFromString("done");
  PyObject* stop = PyUnicode_InternFromString("stop");
  PyObject* stop_before = PyUnicode_InternFromString("stop_before");
  PyObject* after_op = PyUnicode_InternFromString("after_op");
  PyObject* of = PyUnicode_InternFromString("of");
  PyObject* note_reads = PyUnicode_InternFromString("note_reads");
  PyObject* keep_saved = PyUnicode_InternFromString("keep_saved");
  PyObject* parameter = PyUnicode_InternFromString("parameter");
  PyObject* sums = PyUnicode_InternFromString("sums");
  PyObject* results = PyUnicode_InternFromString("results");
  PyObject* keepers = PyUnicode_InternFromString("_keepers");
  PyObject* reached = PyUnicode_InternFromString("reached");
  PyObject* owners = PyUnicode_InternFromString("_owners");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* foreign = PyUnicode_InternFromString("foreign");
  PyObject* by_storage = PyUnicode_InternFromString("by_storage");
  PyObject* read = PyUnicode_InternFromString("read");
  PyObject* hits = PyUnicode_InternFromString("hits");
  PyObject* calls = PyUnicode_InternFromString("calls");
  PyObject* occurrences = PyUnicode_InternFromString("occurrences");
  PyObject* alternations = PyUnicode_InternFromString("alternations");
  PyObject* may_save = PyUnicode_InternFromString("may_save");
  PyObject* waiting = PyUnicode_InternFromString("waiting");
  PyObject* seen = PyUnicode_InternFromString("seen_in_forward");
  PyObject* fetched = PyUnicode_InternFromString("_fetched");
  PyObject* overwritten = PyUnicode_InternFromString("overwritten");
  PyObject* rng_after = PyUnicode_InternFromString("rng_after");
  PyObject* outputs = PyUnicode_InternFromString("outputs");
  PyObject* external = PyUnicode_InternFromString("external");
  PyObject* written = PyUnicode_InternFromString("written");
  PyObject* value = PyUnicode_InternFromString("value");
  PyObject* draws = PyUnicode_InternFromString("_draws");
  PyObject* key = PyUnicode_InternFromString("key");
  PyObject* draw = PyUnicode_InternFromString("draw");
};

inline const Names& names() {
  static const auto* all = new Names();
  return *all;
}

inline bool is_set(PyObject* object, PyObject* attribute) {  // neither None nor False
  Owned found(checked(PyObject_GetAttr(object, attribute)));
  return found.get() != Py_None && found.get() != Py_False;
}

// The value id of a tensor as Python finds it, which names the tensor if it is new to the region. With the GIL.
inline int64_t ask_value_id(Ids& ids, const Tensor& tensor) {
  Owned wrapped(checked(THPVariable_Wrap(tensor)));
  return key_of(Owned(checked(PyObject_CallMethodOneArg(ids.owner, names().of, wrapped.get()))).get());
}

// Whether the library has nothing to find out about a tensor: it is strided, and of no subclass with code of its own.
inline bool is_simple(const Tensor& tensor) {
  const TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return is_plain(impl) && impl->layout() == at::kStrided && storage_of(impl) != nullptr &&
         !impl->has_symbolic_sizes_strides();
}

// Do what `ValueIds._name_parameter` does for an instance of `Parameter` itself. With the GIL.
inline int64_t name_parameter(IdTables& t, const Tensor& tensor, int64_t address) {
  Owned identity(checked(PyLong_FromVoidPtr(object_of(tensor.unsafeGetTensorImpl()))));
  Owned pair(checked(PyTuple_Pack(2, names().parameter, identity.get())));
  const int64_t id = PyObject_Hash(pair.get());
  t.by_storage[address] = id;
  t.parameter_addresses.insert(address);
  ValueInfo& info = t.values[id];
  info.made_of = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  info.is_parameter = true;
  return id;
}

// Whether the tables know a tensor whose storage has this value id: that of a parameter may have to be renamed.
inline bool is_named(const IdTables& t, bool is_parameter, int64_t address, int64_t id) {
  if (!is_parameter) return true;
  const ValueInfo* info = t.find(id);
  return t.parameter_addresses.count(address) > 0 && info != nullptr && info->is_parameter;
}

// Whether a tensor is of torch's own class in Python, or would be.
inline bool is_of_torch(const Tensor& tensor) {
  PyObject* object = object_of(tensor.unsafeGetTensorImpl());
  return object == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass;
}

// Whether all parameters of the modules of a pass are instances of `Parameter` itself, so that no other tensor is a
// component of one: see `_parts_of_parameters` in sac/recompute/parameter_only.py. With the GIL.
inline bool has_plain_parameters(Ids& ids) {
  if (ids.has_plain_parameters >= 0) return ids.has_plain_parameters == 1;
  ids.has_plain_parameters = 0;
  Owned owners(checked(PyObject_GetAttr(ids.owner, names().owners)));
  if (!PyTuple_Check(owners.get())) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(owners.get()); i++) {
    Owned table(checked(PyObject_GetAttr(PyTuple_GET_ITEM(owners.get(), i), names().parameters)));
    if (!PyDict_CheckExact(table.get())) return false;
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(table.get(), &at, &name, &value);)
      if (value != Py_None && reinterpret_cast<PyObject*>(Py_TYPE(value)) != ParameterClass) return false;
  }
  ids.has_plain_parameters = 1;
  return true;
}

// Do what `ValueIds.of_plain` does for a tensor that comes from outside of the region. With the GIL.
inline int64_t name_foreign(Ids& ids, const Tensor& tensor, int64_t address) {
  IdTables& t = **ids.tables;
  Owned pair(checked(Py_BuildValue("(OL)", names().foreign, static_cast<long long>(address))));
  const int64_t id = PyObject_Hash(pair.get());
  ValueInfo& info = t.values[id];
  if (!std::exchange(info.is_external, true))
    t.foreign_storages.push_back(
        c10::weak_intrusive_ptr<StorageImpl>::reclaim_copy(storage_of(tensor.unsafeGetTensorImpl())));
  return t.foreign[address] = id;
}

inline int64_t value_id_of(Ids& ids, const Tensor& tensor, int64_t address) {
  IdTables& t = **ids.tables;
  const bool is_param = is_parameter(tensor.unsafeGetTensorImpl());
  const auto found = t.by_storage.find(address);
  const bool is_new = found == t.by_storage.end();
  if (!is_new && is_named(t, is_param, address, found->second)) return found->second;
  if (is_new && !is_param)
    if (const auto known = t.foreign.find(address); known != t.foreign.end() && is_of_torch(tensor)) return known->second;
  Gil gil;
  if (is_new && is_param) return name_parameter(t, tensor, address);
  if (is_new && is_of_torch(tensor) && has_plain_parameters(ids)) return name_foreign(ids, tensor, address);
  return ask_value_id(ids, tensor);
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
  IdTables& t = **ids.tables;
  const int64_t address = address_of(storage_of(tensor.unsafeGetTensorImpl()));
  const int64_t id = value_id_of(ids, tensor, address);
  signature.add(static_cast<uint64_t>(id));
  signature.add(7 + static_cast<uint64_t>(tensor.dim()));
  for (const int64_t size : tensor.sizes()) signature.add(static_cast<uint64_t>(size));
  for (const int64_t stride : tensor.strides()) signature.add(static_cast<uint64_t>(stride));
  int64_t offset = tensor.storage_offset();
  if (!t.moved.empty())
    if (const auto by = t.moved.find(address); by != t.moved.end()) offset += by->second;
  signature.add(static_cast<uint64_t>(offset));
  signature.add(static_cast<uint64_t>(tensor.scalar_type()));
  if (const int bits = lazy_bits(tensor)) signature.add(static_cast<uint64_t>(bits));
  const ValueInfo* info = t.find(id);
  signature.is_external = signature.is_external || (info != nullptr && info->is_external);
  if (signature.made_of < 0) return;
  signature.made_of = info == nullptr || info->made_of < 0 ? -1 : std::max(signature.made_of, info->made_of);
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

// Every op of torch's own that Python may want signed.
inline const Op* op_to_sign(const OperatorHandle& handle) {
  Gil gil;
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
  if (!is_parameter(tensor.unsafeGetTensorImpl())) return false;
  value_id_of(ids, tensor, address_of(storage_of(tensor.unsafeGetTensorImpl())));
  return true;
}

inline int64_t version_of(const Tensor& tensor) {  // as in sac/tensors.py
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

// Do what `RerunState.note_reads` does for a value that is as its op left it.
inline void note_read(Ids& ids, int64_t address) {
  Owned key(checked(PyLong_FromLongLong(address)));
  PyObject* values = PyDict_GetItemWithError(ids.by_storage, key.get());
  if (values == nullptr && PyErr_Occurred() != nullptr) throw python_error();
  for (Py_ssize_t i = 0; values != nullptr && i < PyList_GET_SIZE(values); i++)
    if (PyObject_SetAttr(PyList_GET_ITEM(values, i), names().read, Py_True) < 0) throw python_error();
}

// Note that an op reads what the region saves, unless that is known. If something else has written to it, Python looks.
inline void note_reads(Ids& ids, const Op& op, const Stack& stack, size_t base) {
  auto& saved = (*ids.tables)->saved;
  if (saved.empty()) return;
  const auto note = [&](const IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    const Tensor& tensor = value.toTensor();
    StorageImpl* storage = storage_of(tensor.unsafeGetTensorImpl());
    if (storage != nullptr) {
      const auto found = saved.find(address_of(storage));
      if (found == saved.end()) return;
      if (version_of(tensor) <= found->second.version) {
        if (std::exchange(found->second.is_read, true)) return;
        Gil gil;
        return note_read(ids, found->first);
      }
    }
    Gil gil;
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

inline void name_result(IdTables& t, const Tensor& tensor, int64_t id, const Signature& signature) {
  StorageImpl* storage = storage_of(tensor.unsafeGetTensorImpl());
  const auto [found, is_new] = t.by_storage.insert({address_of(storage), id});
  if (is_new) t.watch(storage);
  found->second = id;
  ValueInfo& info = t.values[id];
  info.is_external = info.is_external || signature.is_external;
  if (signature.made_of >= 0) info.made_of = signature.made_of;
}

// Do what `ValueIds.name_output` does.
inline void name_results(Ids& ids, const Op& op, const Stack& stack, size_t base, const Signature& signature) {
  IdTables& t = **ids.tables;
  const auto id = static_cast<int64_t>(signature.hash);
  if (op.returns_one_tensor && stack[base].toTensor().defined() && is_simple(stack[base].toTensor()))
    return name_result(t, stack[base].toTensor(), id, signature);
  bool are_simple = !op.returns_one_tensor;
  for (size_t i = 0; i < op.results.size() && are_simple; i++) {
    const IValue& value = stack[base + i];
    are_simple = op.results[i] == Kind::TENSOR && (!value.toTensor().defined() || is_simple(value.toTensor()));
  }
  Gil gil;
  if (!are_simple) {
    Owned out(checked(wrapped(op, stack, base)));
    Owned done(checked(PyObject_CallMethod(ids.owner, "name_output", "OLOL", out.get(), static_cast<long long>(id),
                                                 signature.is_external ? Py_True : Py_False,
                                                 static_cast<long long>(signature.made_of))));
    return;
  }
  for (size_t i = 0; i < op.results.size(); i++) {
    const Tensor& tensor = stack[base + i].toTensor();
    if (!tensor.defined()) continue;
    Owned pair(checked(Py_BuildValue("(Ln)", static_cast<long long>(id), static_cast<Py_ssize_t>(i))));
    name_result(t, tensor, PyObject_Hash(pair.get()), signature);
  }
}

inline void after_op(Ids& ids, const Site& site) {
  if (ids.state != nullptr) {
    (*ids.tables)->recent.clear();
    count(*ids.hits, site.rule);
  } else if (ids.progress != nullptr) {
    note_op(*ids.progress);
  } else {
    Gil gil;
    Owned progress(checked(PyObject_GetAttr(ids.mode, names().progress)));
    if (!pass_on(progress.get())) Owned(checked(PyObject_CallMethodNoArgs(progress.get(), names().after_op)));
  }
}

// Let a recomputation stop before an op that writes to this argument, or to none; it stops by an exception.
inline void stop_before(Ids& ids, const IValue* written) {
  if (ids.progress != nullptr && !is_done(*ids.progress)) return;
  Gil gil;
  if (ids.progress != nullptr) {
    if (const auto stops = may_stop(*ids.progress, written)) {
      if (!*stops) return;
      Owned stopped(checked(PyObject_CallMethodNoArgs(reinterpret_cast<PyObject*>(ids.progress), names().stop)));
    }
  }
  Owned progress(checked(PyObject_GetAttr(ids.mode, names().progress)));
  if ((written == nullptr && pass_on(progress.get())) || !is_set(progress.get(), names().done)) return;
  Owned tensors(checked(PyTuple_New(written != nullptr ? 1 : 0)));
  if (written != nullptr) PyTuple_SET_ITEM(tensors.get(), 0, checked(THPVariable_Wrap(written->toTensor())));
  Owned done(checked(PyObject_CallMethodOneArg(progress.get(), names().stop_before, tensors.get())));
}

inline Site* site_in(Ids& ids, const OperatorHandle& op) {
  PyObject* path = reinterpret_cast<Mode*>(ids.mode)->sites;
  if (path != ids.path || ids.path_sites == nullptr) {
    ids.path = path;
    ids.path_sites = ids.sites->at(path);
  }
  return ids.path_sites != nullptr ? ids.sites->find(ids.path_sites, &op.schema()) : nullptr;
}

// Whether a module that is saved whole may have returned a storage, or may be able to reach it.
inline bool is_of_modules(Ids& ids, const StorageImpl* storage) {
  Gil gil;
  const int kept = PyDict_Contains(ids.keepers, Owned(checked(PyLong_FromLongLong(address_of(storage)))).get());
  if (kept < 0) throw python_error();
  if (kept == 1 || !PyList_CheckExact(ids.reached)) return true;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ids.reached); i++) {
    PyObject* one = PyList_GET_ITEM(ids.reached, i);
    if (!THPVariable_Check(one) || !is_simple(THPVariable_Unpack(one))) return true;
    if (storage_of(THPVariable_Unpack(one).unsafeGetTensorImpl()) == storage) return true;
  }
  return false;
}

// Whether nothing needs what the op is about to overwrite: an op of this pass has made the tensor, it is not saved, and
// autograd has not saved it since the last op. For all other tensors see `RerunState.before_write`, and
// `RecomputeMode._check_write`.
inline bool may_overwrite(Ids& ids, const Tensor& tensor) {
  const IdTables& t = **ids.tables;
  const StorageImpl* storage = storage_of(tensor.unsafeGetTensorImpl());
  const int64_t address = address_of(storage);
  if (ids.has_modules && is_of_modules(ids, storage)) return false;
  const auto id = t.by_storage.find(address);
  if (id == t.by_storage.end()) return false;
  const ValueInfo* info = t.find(id->second);
  if (info != nullptr && (info->is_parameter || info->is_input)) return false;
  if (ids.state != nullptr) return t.saved.count(address) == 0 && !t.is_recent(address);
  Gil gil;
  return !holds(ids.held, Owned(checked(PyLong_FromLongLong(address))).get());
}

}  // namespace sac
