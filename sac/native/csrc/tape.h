// The values and entries of a tape; see Note [The tape] in sac/recompute/tape.py, which has everything else of it.
#pragma once

#include "ops.h"

#include <ATen/ScalarOps.h>
#include <c10/util/flat_hash_map.h>
#include <structmember.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <cstring>
#include <memory>
#include <utility>

namespace torch::jit {
TORCH_PYTHON_API py::object toPyObject(IValue value);  // its header takes seconds to compile
}

namespace sac {

struct Gil {  // holds the GIL, whoever had it before
  Gil() : state(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  PyGILState_STATE state;
};

using Owned = THPObjectPtr;  // a Python object that is released at the end of the scope, with the GIL

struct Value {
  TensorImpl* tensor;  // held weakly: while it is, no other tensor has its address
  int root;
  uint32_t version;  // at the last check
  const StorageImpl* storage;  // nullptr if others may exchange it: of parameters and external tensors
};

// An entry that the recorder here wrote has an `op`; one that Python wrote has `rest`, the template of its arguments.
struct Entry {
  PyObject* site;  // owned if Python wrote it; otherwise by the tape's `sites`, as is `op`
  const Op* op;
  PyObject* rest;
  int arguments;  // index of its first argument in the pool
  int reads;      // index of the first value that it reads
  int read_count;
  int first;  // its first result
  bool draws = false;  // it has drawn random numbers
};

struct Recent {  // a tensor that autograd has saved since the last op
  int handle;
  Tensor tensor;
  int root;
};

struct Factory {  // a factory's result that no op has written to
  int root;
  int entry;
  bool is_uninitialised;  // false if Python wrote the entry
};

struct ParameterLeaf {  // a parameter that the recorder here has met
  int value;
  uint32_t version;
  std::vector<int64_t> shape;
  bool is_told;  // Python's tables have it too
};

struct TapeDraw {  // an op that has drawn from the default generator of the CPU and runs again: its states before and after
  int entry;
  Tensor before, after;
};

struct Tables {
  std::vector<Value> values;
  std::vector<Entry> entries;
  std::vector<int> reads;
  std::vector<IValue> pool;  // arguments that are not tensors; for a tensor: whether it is there; for a list: its length
  ska::flat_hash_map<TensorImpl*, int> ids;
  ska::flat_hash_map<StorageImpl*, int> roots;         // of the storages recorded so far
  std::vector<c10::weak_intrusive_ptr<StorageImpl>> storages;
  std::vector<int> unsynced;  // values whose storages are recorded by the next `sync`
  std::vector<int> scratch;
  std::vector<Recent> recent;
  std::vector<Recent> spare;  // empty, and has the memory for the next ones
  std::vector<int> hits;         // by rule
  std::vector<int> alternations;  // by rule
  ska::flat_hash_map<PyObject*, int> calls;  // by CallSite: calls on which was decided
  std::vector<ParameterLeaf> parameters;
  std::vector<Factory> factories;
  std::vector<TapeDraw> drawn;  // that Python has not been told of
  Tensor left;  // the state in which the CPU's default generator was last seen, which is held anyway
  bool may_save = false;
  int64_t recorded = 0;  // entries written here
};

struct Tape {
  PyObject_HEAD
  Tables* tables;
  char needs_attention;  // every op goes to Python; see `Tape.needs_attention`
  unsigned long thread;  // that of the region; 0 before its forward
  // While it records: borrowed from the mode, which is on the stack.
  Tape* outer;
  int64_t depth;  // of the stack of modes, with ours on top
  PyObject* mode;
  PyObject* recorder;
  PyObject* owner;  // the NativeTape
  // Python's tables, of its tape and of the recorder, until the forward is over. The tuple holds them.
  PyObject* python;
  PyObject* kept;
  PyObject* kept_in;
  PyObject* persistent;
  PyObject* counts;  // `output_counts`
  PyObject* writers;
  PyObject* writes;
  PyObject* seen_at;
  PyObject* leaves;  // without the parameters that were met here
  PyObject* unpacked_early;
  PyObject* rules;
  PyObject* parts;
  PyObject* routing;
  PyObject* routing_sums;  // None if the call is not verified
  Sites* sites;      // owned: the entries need it
  PyObject* path;  // the dictionary of call sites that `path_sites` belongs to
  PathSites* path_sites;
};

inline StorageImpl* storage_of(const TensorImpl* tensor) {
  return tensor->has_storage() ? tensor->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

inline bool is_plain(const TensorImpl* tensor) { return !tensor->key_set().has(c10::DispatchKey::Python); }

inline bool is_alive(TensorImpl* tensor) { return c10::raw::intrusive_ptr::use_count(tensor) > 0; }

inline Tensor lock(TensorImpl* tensor) {  // undefined if it is gone
  auto weak = c10::weak_intrusive_ptr<TensorImpl>::reclaim_copy(tensor);
  auto strong = weak.lock();
  return strong ? Tensor(std::move(strong)) : Tensor();
}

// Let go of what autograd has saved since the last op. Freeing a tensor may run Python, and autograd then save more.
inline void clear_recent(Tables& t) {
  if (t.recent.empty()) return;
  std::vector<Recent> freed;
  freed.swap(t.recent);
  t.recent.swap(t.spare);
  freed.clear();
  if (t.spare.capacity() == 0) t.spare.swap(freed);
}

// Let go of all tensors but the parameters, from which a replay may start.
inline void forget_tensors(Tables& t) {
  auto leaf = t.parameters.begin();
  for (size_t number = 0; number < t.values.size(); number++) {
    Value& value = t.values[number];
    if (leaf != t.parameters.end() && leaf->value == static_cast<int>(number)) {
      ++leaf;
    } else if (value.tensor != nullptr) {
      c10::raw::weak_intrusive_ptr::decref(value.tensor);
      value.tensor = nullptr;
    }
  }
  t.ids.clear();
  t.roots.clear();
  t.storages.clear();
  t.unsynced.clear();
  clear_recent(t);
}

inline int add_value(Tables& t, TensorImpl* tensor, int root, uint32_t version, bool is_external = false) {
  const int number = static_cast<int>(t.values.size());
  c10::raw::weak_intrusive_ptr::incref(tensor);
  t.values.push_back(Value{tensor, root < 0 ? number : root, version, is_external ? nullptr : storage_of(tensor)});
  t.ids[tensor] = number;
  return number;
}

inline void record_storage(Tables& t, StorageImpl* storage, int root) {
  t.roots[storage] = root;
  t.storages.push_back(c10::weak_intrusive_ptr<StorageImpl>::reclaim_copy(storage));
}

// Record the storages of the values since the last call, of which a tensor, or what is kept of it, is still there.
inline void sync(Tape& tape) {
  Tables& t = *tape.tables;
  if (t.unsynced.empty()) return;
  std::vector<int> values;
  values.swap(t.unsynced);
  std::optional<Gil> gil;
  for (const int value : values) {
    Tensor tensor = lock(t.values[value].tensor);
    if (!tensor.defined() && tape.kept != nullptr) {
      if (!gil) gil.emplace();
      PyObject* number = PyLong_FromLong(value);
      PyObject* held = PyDict_GetItem(tape.kept, number);
      Py_DECREF(number);
      if (held != nullptr && THPVariable_Check(held)) tensor = THPVariable_Unpack(held);
    }
    if (!tensor.defined()) continue;
    StorageImpl* storage = storage_of(tensor.unsafeGetTensorImpl());
    if (storage != nullptr && t.roots.find(storage) == t.roots.end()) record_storage(t, storage, t.values[value].root);
  }
}

template <typename Slot>
PyObject* object_in(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); })
    return slot.load_pyobj();
  else
    return slot._unchecked_untagged_pyobj();  // torch 2.11, 2.12
}

// The Python object of a tensor, or nullptr; only its address and its type may be read without the GIL.
inline PyObject* object_of(const TensorImpl* tensor) { return object_in(*const_cast<TensorImpl*>(tensor)->pyobj_slot()); }

inline void count(std::vector<int>& by_rule, int rule) {
  if (rule < 0) return;
  if (static_cast<size_t>(rule) >= by_rule.size()) by_rule.resize(rule + 1);
  by_rule[rule]++;
}

inline void count_hit(Tables& t, int rule) { count(t.hits, rule); }

inline int& alternations_of(Tables& t, int rule) {
  if (static_cast<size_t>(rule) >= t.alternations.size()) t.alternations.resize(rule + 1);
  return t.alternations[rule];
}

// -- The methods of the type, for Python

inline PyObject* checked(PyObject* object) {
  if (object == nullptr) throw python_error();
  return object;
}

inline Tensor tensor_from(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "expected a tensor");
  return THPVariable_Unpack(object);
}

inline PyObject* number_or_none(int number) {
  if (number < 0) Py_RETURN_NONE;
  return PyLong_FromLong(number);
}

inline PyObject* tape_known(Tape* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  const auto found = self->tables->ids.find(tensor_from(tensor).unsafeGetTensorImpl());
  return number_or_none(found == self->tables->ids.end() ? -1 : found->second);
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_number(Tape* self, PyObject* const* args, Py_ssize_t) {  // tensor, root or -1, version, address
  HANDLE_TH_ERRORS
  const long root = PyLong_AsLong(args[1]), version = PyLong_AsLong(args[2]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyLong_FromLong(add_value(*self->tables, tensor_from(args[0]).unsafeGetTensorImpl(), static_cast<int>(root),
                                   static_cast<uint32_t>(version), PyObject_IsTrue(args[3]) == 0));
  END_HANDLE_TH_ERRORS
}

// `Tape.add_leaf` of an input: returns its number, or None if it is not a plain tensor with a storage.
inline PyObject* tape_add_input(Tape* self, PyObject* object) {
  HANDLE_TH_ERRORS
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(object);
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  StorageImpl* storage = storage_of(impl);
  const auto& counter = impl->version_counter();
  if (!is_plain(impl) || storage == nullptr || tensor.layout() != at::kStrided || !counter.enabled()) Py_RETURN_NONE;
  sync(*self);
  Tables& t = *self->tables;
  const auto found = t.roots.find(storage);
  if (found != t.roots.end())
    return PyLong_FromLong(add_value(t, impl, found->second, t.values[found->second].version));
  const int value = add_value(t, impl, -1, counter.current_version());
  record_storage(t, storage, value);
  return PyLong_FromLong(value);
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_watch(Tape* self, PyObject* value) {  // its storage is recorded by the next sync
  self->tables->unsynced.push_back(static_cast<int>(PyLong_AsLong(value)));
  Py_RETURN_NONE;
}

inline PyObject* tape_entry_count(Tape* self, PyObject*) { return PyLong_FromSize_t(self->tables->entries.size()); }

inline PyObject* tape_value_count(Tape* self, PyObject*) { return PyLong_FromSize_t(self->tables->values.size()); }

inline PyObject* tape_append(Tape* self, PyObject* const* args, Py_ssize_t) {  // site, rest, reads, first
  Tables& t = *self->tables;
  PyObject* reads = PySequence_Fast(args[2], "reads");
  if (reads == nullptr) return nullptr;
  Entry entry{args[0], nullptr, args[1], static_cast<int>(t.pool.size()), static_cast<int>(t.reads.size()),
              static_cast<int>(PySequence_Fast_GET_SIZE(reads)), static_cast<int>(PyLong_AsLong(args[3]))};
  for (int i = 0; i < entry.read_count; i++)
    t.reads.push_back(static_cast<int>(PyLong_AsLong(PySequence_Fast_GET_ITEM(reads, i))));
  Py_DECREF(reads);
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_INCREF(entry.site);
  Py_INCREF(entry.rest);
  t.entries.push_back(entry);
  Py_RETURN_NONE;
}

inline bool is_value(Tape* self, long value) {
  if (value >= 0 && static_cast<size_t>(value) < self->tables->values.size()) return true;
  if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_IndexError, "no such value");
  return false;
}

// Whether a value's tensor has another storage now: `tensor.data = …` moves no version.
inline bool has_moved(const Value& value, const TensorImpl* tensor) {
  return value.storage != nullptr && storage_of(tensor) != value.storage;
}

inline PyObject* tape_has_moved(Tape* self, PyObject* const* args, Py_ssize_t) {  // tensor, value
  HANDLE_TH_ERRORS
  const long value = PyLong_AsLong(args[1]);
  if (!is_value(self, value)) return nullptr;
  return PyBool_FromLong(has_moved(self->tables->values[value], tensor_from(args[0]).unsafeGetTensorImpl()));
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_version(Tape* self, PyObject* number) {
  const long value = PyLong_AsLong(number);
  return is_value(self, value) ? PyLong_FromLong(self->tables->values[value].version) : nullptr;
}

inline PyObject* tape_root_of(Tape* self, PyObject* number) {
  const long value = PyLong_AsLong(number);
  return is_value(self, value) ? PyLong_FromLong(self->tables->values[value].root) : nullptr;
}

inline PyObject* tape_set_version(Tape* self, PyObject* const* args, Py_ssize_t) {  // value, version
  const long value = PyLong_AsLong(args[0]), version = PyLong_AsLong(args[1]);
  if (!is_value(self, value) || PyErr_Occurred() != nullptr) return nullptr;
  self->tables->values[value].version = static_cast<uint32_t>(version);
  Py_RETURN_NONE;
}

inline PyObject* tape_root_at(Tape* self, PyObject* address) {
  auto* storage = static_cast<StorageImpl*>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred() != nullptr) return nullptr;
  const auto found = self->tables->roots.find(storage);
  return number_or_none(found == self->tables->roots.end() ? -1 : found->second);
}

// Address, root, tensor. A tensor without a storage goes by its own address, and the tape does not hold that.
inline PyObject* tape_record_storage(Tape* self, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto* address = static_cast<StorageImpl*>(PyLong_AsVoidPtr(args[0]));
  const long root = PyLong_AsLong(args[1]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  const Tensor tensor = tensor_from(args[2]);
  if (storage_of(tensor.unsafeGetTensorImpl()) == address)
    record_storage(*self->tables, address, static_cast<int>(root));
  else
    self->tables->roots[address] = static_cast<int>(root);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_sync(Tape* self, PyObject*) {
  HANDLE_TH_ERRORS
  sync(*self);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_tensor_of(Tape* self, PyObject* number) {
  HANDLE_TH_ERRORS
  const long value = PyLong_AsLong(number);
  if (!is_value(self, value)) return nullptr;
  TensorImpl* impl = self->tables->values[value].tensor;
  const Tensor tensor = impl != nullptr ? lock(impl) : Tensor();
  if (!tensor.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(tensor);
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_alive(Tape* self, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* found = PyDict_New();
  const auto& values = self->tables->values;
  for (size_t value = 0; value < values.size(); value++) {
    const Tensor tensor = values[value].tensor != nullptr ? lock(values[value].tensor) : Tensor();
    if (!tensor.defined()) continue;
    PyObject* number = PyLong_FromSize_t(value);
    PyObject* wrapped = THPVariable_Wrap(tensor);
    PyDict_SetItem(found, number, wrapped);
    Py_DECREF(number);
    Py_DECREF(wrapped);
  }
  return found;
  END_HANDLE_TH_ERRORS
}

// Extend a list of roots, or of sites, reads, templates or first results, to the present length of the tape.
template <typename Item>
PyObject* extend(PyObject* list, size_t length, Item item) {
  for (auto i = static_cast<size_t>(PyList_GET_SIZE(list)); i < length; i++) {
    PyObject* one = item(i);
    if (one == nullptr || PyList_Append(list, one) < 0) {
      Py_XDECREF(one);
      return nullptr;
    }
    Py_DECREF(one);
  }
  Py_INCREF(list);
  return list;
}

inline PyObject* tape_roots(Tape* self, PyObject* list) {
  const auto& values = self->tables->values;
  return extend(list, values.size(), [&](size_t i) { return PyLong_FromLong(values[i].root); });
}

inline PyObject* tape_sites(Tape* self, PyObject* list) {
  const auto& entries = self->tables->entries;
  return extend(list, entries.size(), [&](size_t i) { return Py_NewRef(entries[i].site); });
}

inline PyObject* tape_templates(Tape* self, PyObject* list) {  // None for an entry whose arguments are here
  const auto& entries = self->tables->entries;
  return extend(list, entries.size(),
                [&](size_t i) { return Py_NewRef(entries[i].rest != nullptr ? entries[i].rest : Py_None); });
}

// An argument that is no tensor, as Python gets it.
inline PyObject* plain_argument(const c10::Argument& argument, const IValue& value) {
  auto type = argument.real_type();
  if (const auto* optional = type->castRaw<c10::OptionalType>()) type = optional->getElementType();
  if (value.isInt()) {
    if (type->kind() == c10::TypeKind::ScalarTypeType)
      return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(value.toInt()))));
    if (type->kind() == c10::TypeKind::LayoutType)
      return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(value.toInt()))));
    if (type->kind() == c10::TypeKind::MemoryFormatType)
      return Py_NewRef(torch::utils::getTHPMemoryFormat(static_cast<at::MemoryFormat>(value.toInt())));
  }
  return torch::jit::toPyObject(value).release().ptr();
}

// The arguments of an entry, by the schema, with `hole` for each tensor; None if Python has their template.
inline PyObject* tape_arguments(Tape* self, PyObject* const* args, Py_ssize_t) {  // entry, hole
  HANDLE_TH_ERRORS
  const Tables& t = *self->tables;
  const Entry entry = t.entries.at(PyLong_AsSize_t(args[0]));
  PyObject* hole = args[1];
  if (entry.op == nullptr) Py_RETURN_NONE;
  const auto& schema = entry.op->handle.schema().arguments();
  const auto& kinds = entry.op->arguments;
  size_t argument = entry.arguments;
  Owned found(checked(PyList_New(0)));
  for (size_t i = 0; i < kinds.size(); i++) {
    const IValue& held = t.pool.at(argument++);
    const bool is_list = kinds[i] == Kind::TENSORS || kinds[i] == Kind::OPTIONAL_TENSORS;
    Owned one;
    if (is_list && !held.isNone()) {
      const auto length = static_cast<Py_ssize_t>(held.toInt());
      one = checked(PyList_New(length));
      for (Py_ssize_t k = 0; k < length; k++) {
        const bool is_there = kinds[i] == Kind::TENSORS || t.pool.at(argument++).toBool();
        PyList_SET_ITEM(one.get(), k, Py_NewRef(is_there ? hole : Py_None));
      }
    } else if (kinds[i] == Kind::TENSOR && held.isDevice()) {
      one = Py_NewRef(hole);
    } else {
      one = checked(plain_argument(schema[i], held));
    }
    if (PyList_Append(found.get(), one.get()) < 0) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_first_outputs(Tape* self, PyObject* list) {
  const auto& entries = self->tables->entries;
  return extend(list, entries.size(), [&](size_t i) { return PyLong_FromLong(entries[i].first); });
}

inline PyObject* tape_reads(Tape* self, PyObject* list) {
  const Tables& t = *self->tables;
  return extend(list, t.entries.size(), [&](size_t i) -> PyObject* {
    const Entry entry = t.entries[i];
    PyObject* reads = PyList_New(entry.read_count);
    for (int k = 0; reads != nullptr && k < entry.read_count; k++)
      PyList_SET_ITEM(reads, k, PyLong_FromLong(t.reads[entry.reads + k]));
    return reads;
  });
}

// A tape without arguments, to compare later tapes with: sites, reads, results and roots. It holds no tensor.
inline PyObject* tape_layout(Tape* self, PyObject*) {
  PyTypeObject* type = Py_TYPE(self);
  auto* made = reinterpret_cast<Tape*>(type->tp_alloc(type, 0));
  if (made == nullptr) return nullptr;
  made->tables = new Tables();
  made->sites = reinterpret_cast<Sites*>(Py_XNewRef(self->sites));
  Tables& t = *made->tables;
  t.reads = self->tables->reads;
  t.parameters = self->tables->parameters;
  for (const Value& value : self->tables->values) t.values.push_back(Value{nullptr, value.root, 0, nullptr});
  for (const Entry& entry : self->tables->entries) {
    t.entries.push_back(entry);
    t.entries.back().rest = nullptr;
    if (entry.op == nullptr) Py_INCREF(entry.site);
  }
  return reinterpret_cast<PyObject*>(made);
}

inline PyObject* tape_has_layout(Tape* self, PyObject* object) {
  if (Py_TYPE(object) != Py_TYPE(self)) Py_RETURN_FALSE;
  const Tables &a = *self->tables, &b = *reinterpret_cast<Tape*>(object)->tables;
  bool same = a.entries.size() == b.entries.size() && a.values.size() == b.values.size() && a.reads == b.reads &&
              a.parameters.size() == b.parameters.size();
  for (size_t i = 0; same && i < a.parameters.size(); i++) same = a.parameters[i].value == b.parameters[i].value;
  for (size_t i = 0; same && i < a.entries.size(); i++) {
    const Entry &one = a.entries[i], &other = b.entries[i];
    same = one.site == other.site && one.first == other.first && one.read_count == other.read_count;
  }
  for (size_t i = 0; same && i < a.values.size(); i++) same = a.values[i].root == b.values[i].root;
  return PyBool_FromLong(same);
}

inline PyObject* tape_hits(Tape* self, PyObject*) {  // index of a rule -> its hits that Python did not count
  PyObject* found = PyDict_New();
  const auto& hits = self->tables->hits;
  for (size_t rule = 0; rule < hits.size(); rule++) {
    if (hits[rule] == 0) continue;
    PyObject *key = PyLong_FromSize_t(rule), *count = PyLong_FromLong(hits[rule]);
    PyDict_SetItem(found, key, count);
    Py_DECREF(key);
    Py_DECREF(count);
  }
  return found;
}

inline PyObject* tape_calls(Tape* self, PyObject* site) {
  const auto found = self->tables->calls.find(site);
  return PyLong_FromLong(found == self->tables->calls.end() ? 0 : found->second);
}

inline PyObject* tape_set_calls(Tape* self, PyObject* const* args, Py_ssize_t) {  // site, calls
  self->tables->calls[args[0]] = static_cast<int>(PyLong_AsLong(args[1]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_RETURN_NONE;
}

inline PyObject* tape_alternations(Tape* self, PyObject* rule) {
  return PyLong_FromLong(alternations_of(*self->tables, static_cast<int>(PyLong_AsLong(rule))));
}

inline PyObject* tape_set_alternations(Tape* self, PyObject* const* args, Py_ssize_t) {  // rule, number
  alternations_of(*self->tables, static_cast<int>(PyLong_AsLong(args[0]))) = static_cast<int>(PyLong_AsLong(args[1]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_RETURN_NONE;
}

// The parameters met here that Python does not know of: value, tensor or None if it is gone, version, shape. It
// does now.
inline PyObject* tape_tell_parameters(Tape* self, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* found = PyList_New(0);
  const Tables& t = *self->tables;
  for (size_t k = 0; k < t.parameters.size(); k++) {  // the collector may run in here, and its ops add parameters
    if (t.parameters[k].is_told) continue;
    self->tables->parameters[k].is_told = true;
    const ParameterLeaf leaf = t.parameters[k];
    TensorImpl* impl = t.values[leaf.value].tensor;
    const Tensor tensor = impl != nullptr ? lock(impl) : Tensor();
    PyObject* wrapped = tensor.defined() ? THPVariable_Wrap(tensor) : Py_NewRef(Py_None);
    PyObject* shape = PyTuple_New(static_cast<Py_ssize_t>(leaf.shape.size()));
    for (size_t i = 0; i < leaf.shape.size(); i++)
      PyTuple_SET_ITEM(shape, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(leaf.shape[i]));
    PyObject* item = Py_BuildValue("(iNIN)", leaf.value, wrapped, leaf.version, shape);
    PyList_Append(found, item);
    Py_XDECREF(item);
  }
  return found;
  END_HANDLE_TH_ERRORS
}

inline bool is_same_state(const Tensor& one, const Tensor& other) {
  return one.defined() && one.nbytes() == other.nbytes() &&
         std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

// An op has drawn. It has mostly begun in the state that the last one has left: then both have one tensor.
inline void note_draw(Tables& t, int entry, Tensor before, Tensor after) {
  if (is_same_state(t.left, before)) before = t.left;
  t.left = after;
  t.drawn.push_back(TapeDraw{entry, std::move(before), std::move(after)});
}

inline PyObject* tape_note_left(Tape* self, PyObject* state) {  // see `left`
  HANDLE_TH_ERRORS
  self->tables->left = tensor_from(state);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_take_draws(Tape* self, PyObject*) {  // what Python has not been told of: entry, before, after
  HANDLE_TH_ERRORS
  std::vector<TapeDraw> drawn;
  drawn.swap(self->tables->drawn);
  Owned found(checked(PyList_New(0)));
  for (const TapeDraw& one : drawn) {
    Owned told(checked(Py_BuildValue("(iNN)", one.entry, THPVariable_Wrap(one.before), THPVariable_Wrap(one.after))));
    if (PyList_Append(found.get(), told.get()) < 0) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

inline const ParameterLeaf* parameter_of(const Tables& t, int value) {
  for (const ParameterLeaf& leaf : t.parameters)
    if (leaf.value == value) return &leaf;
  return nullptr;
}

inline bool is_living_parameter(const Tables& t, int value) {  // one that the recorder here has met
  const ParameterLeaf* leaf = parameter_of(t, value);
  TensorImpl* impl = leaf != nullptr ? t.values[leaf->value].tensor : nullptr;
  return impl != nullptr && is_alive(impl);
}

// Those of these leaves that are not parameters met here, or are gone.
inline PyObject* tape_leaves_to_check(Tape* self, PyObject* leaves) {
  PyObject* found = PyList_New(0);
  PyObject* all = PySequence_Fast(leaves, "leaves");
  for (Py_ssize_t i = 0; all != nullptr && i < PySequence_Fast_GET_SIZE(all); i++) {
    PyObject* value = PySequence_Fast_GET_ITEM(all, i);
    if (!is_living_parameter(*self->tables, static_cast<int>(PyLong_AsLong(value)))) PyList_Append(found, value);
  }
  Py_XDECREF(all);
  return found;
}

// The ids, as Python's `id`, of the parameters among these leaves.
inline PyObject* tape_parameter_ids(Tape* self, PyObject* leaves) {
  PyObject* found = PySet_New(nullptr);
  PyObject* all = PySequence_Fast(leaves, "leaves");
  for (Py_ssize_t i = 0; all != nullptr && i < PySequence_Fast_GET_SIZE(all); i++) {
    const ParameterLeaf* leaf =
        parameter_of(*self->tables, static_cast<int>(PyLong_AsLong(PySequence_Fast_GET_ITEM(all, i))));
    TensorImpl* impl = leaf != nullptr ? self->tables->values[leaf->value].tensor : nullptr;
    const Tensor tensor = impl != nullptr ? lock(impl) : Tensor();
    if (!tensor.defined()) continue;
    PyObject* id = PyLong_FromVoidPtr(object_of(impl));
    PySet_Add(found, id);
    Py_XDECREF(id);
  }
  Py_XDECREF(all);
  return found;
}

inline const Factory* factory_at(const Tables& t, int root) {
  for (const Factory& one : t.factories)
    if (one.root == root) return &one;
  return nullptr;
}

inline void remove_factory(Tables& t, int root) {
  auto& all = t.factories;
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Factory& one) { return one.root == root; }), all.end());
}

inline PyObject* tape_add_factory(Tape* self, PyObject* const* args, Py_ssize_t) {  // root, entry
  const Factory added{static_cast<int>(PyLong_AsLong(args[0])), static_cast<int>(PyLong_AsLong(args[1])), false};
  if (PyErr_Occurred() != nullptr) return nullptr;
  remove_factory(*self->tables, added.root);
  self->tables->factories.push_back(added);
  Py_RETURN_NONE;
}

inline PyObject* tape_factory(Tape* self, PyObject* root) {  // the entry that made it; None if no factory did
  const Factory* found = factory_at(*self->tables, static_cast<int>(PyLong_AsLong(root)));
  if (PyErr_Occurred() != nullptr) return nullptr;
  return number_or_none(found != nullptr ? found->entry : -1);
}

inline PyObject* tape_factory_count(Tape* self, PyObject*) { return PyLong_FromSize_t(self->tables->factories.size()); }

inline PyObject* tape_remove_factory(Tape* self, PyObject* root) {
  remove_factory(*self->tables, static_cast<int>(PyLong_AsLong(root)));
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_RETURN_NONE;
}

inline PyObject* tape_recent(Tape* self, PyObject*) {
  HANDLE_TH_ERRORS
  const std::vector<Recent> all = self->tables->recent;  // the collector may run in here, and autograd save more
  PyObject* found = PyList_New(0);
  for (const Recent& one : all) {
    PyObject* item = Py_BuildValue("(iNi)", one.handle, THPVariable_Wrap(one.tensor), one.root);
    PyList_Append(found, item);
    Py_DECREF(item);
  }
  return found;
  END_HANDLE_TH_ERRORS
}

inline PyObject* tape_clear_recent(Tape* self, PyObject*) {
  clear_recent(*self->tables);
  Py_RETURN_NONE;
}

inline PyObject* tape_note_recent(Tape* self, PyObject* const* args, Py_ssize_t) {  // handle, tensor, root
  HANDLE_TH_ERRORS
  self->tables->recent.push_back(Recent{static_cast<int>(PyLong_AsLong(args[0])), tensor_from(args[1]),
                                        static_cast<int>(PyLong_AsLong(args[2]))});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline void forget_python(Tape& tape) {
  tape.kept = tape.kept_in = tape.persistent = tape.counts = tape.writers = tape.writes = tape.seen_at = tape.leaves =
      tape.unpacked_early = tape.rules = tape.parts = tape.routing = tape.routing_sums = nullptr;
  Py_CLEAR(tape.python);
}

inline void release(Tape* self) {
  Tables& t = *self->tables;
  t.parameters.clear();
  t.drawn.clear();
  t.left.reset();
  forget_tensors(t);
  for (Entry& entry : t.entries)
    if (entry.op == nullptr) {
      Py_CLEAR(entry.site);
      Py_CLEAR(entry.rest);
    }
  t.entries.clear();
  t.values.clear();
  t.reads.clear();
  t.pool.clear();
}

inline PyObject* tape_forget_tensors(Tape* self, PyObject*) {  // the forward is over
  forget_tensors(*self->tables);
  self->tables->factories.clear();
  self->tables->left.reset();
  self->tables->scratch.clear();
  forget_python(*self);
  Py_RETURN_NONE;
}

inline PyObject* tape_drop(Tape* self, PyObject*) {
  release(self);
  if (self->mode == nullptr) forget_python(*self);  // a forward has failed
  Py_RETURN_NONE;
}

// Tables of tapes that are gone, whose memory the next tapes use. With the GIL.
inline std::vector<std::unique_ptr<Tables>> spare_tables;

constexpr size_t MOST_TABLES_KEPT = 8, MOST_VALUES_KEPT = 1024;

inline Tables* take_tables() {
  if (!spare_tables.empty()) {
    Tables* found = spare_tables.back().release();
    spare_tables.pop_back();
    return found;
  }
  auto* made = new Tables();
  // As many as a small region has, so that its first ops do not move them again and again.
  made->entries.reserve(32);
  made->values.reserve(64);
  made->reads.reserve(64);
  made->pool.reserve(128);
  made->ids.reserve(64);
  made->unsynced.reserve(32);
  return made;
}

// Take back the tables of a tape that has been released.
inline void give_back(Tables* tables) {
  std::unique_ptr<Tables> owned(tables);
  if (!owned || spare_tables.size() >= MOST_TABLES_KEPT || owned->values.capacity() > MOST_VALUES_KEPT) return;
  Tables& t = *owned;
  t.scratch.clear();
  t.hits.clear();
  t.alternations.clear();
  t.calls.clear();
  t.factories.clear();
  t.may_save = false;
  t.recorded = 0;
  spare_tables.push_back(std::move(owned));
}

inline PyObject* tape_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Tape*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->tables = take_tables();
  return reinterpret_cast<PyObject*>(self);
}

inline int tape_traverse(Tape* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (self->tables != nullptr)
    for (const Entry& entry : self->tables->entries)
      if (entry.op == nullptr) {
        Py_VISIT(entry.site);
        Py_VISIT(entry.rest);
      }
  Py_VISIT(self->sites);
  Py_VISIT(self->python);
  return 0;
}

inline int tape_clear(Tape* self) {
  forget_python(*self);
  if (self->tables != nullptr) release(self);
  return 0;
}

inline void tape_dealloc(Tape* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  tape_clear(self);
  give_back(std::exchange(self->tables, nullptr));
  Py_CLEAR(self->sites);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyMemberDef tape_members[] = {
    {"needs_attention", T_BOOL, offsetof(Tape, needs_attention), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

inline PyObject* tape_may_save(Tape* self, void*) { return PyBool_FromLong(self->tables->may_save); }

inline PyObject* tape_recorded(Tape* self, void*) { return PyLong_FromLongLong(self->tables->recorded); }

inline PyGetSetDef tape_getset[] = {
    {"recorded", reinterpret_cast<getter>(tape_recorded), nullptr, nullptr, nullptr},
    {"may_save", reinterpret_cast<getter>(tape_may_save), nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace sac
