// What is known of the values of one pass over one region; see Note [Value ids] in sac/recompute/value_ids.py.
//
// The thread of the pass reads and writes these tables without the GIL. Python gets at them through views that behave
// like the dictionaries and sets which `ValueIds` has without the library.
#pragma once

#include "tape.h"

#include <algorithm>
#include <optional>

namespace sac {

struct ValueInfo {
  PyObject* producer = nullptr;  // call site
  int64_t made_of = -1;          // what `ParameterOnlyIds.of` returns
  bool is_external = false;
  bool is_parameter = false;
  bool is_input = false;
  bool is_elsewhere = false;  // an input that the region does not hold as it is
};

struct SavedStorage {
  int64_t version;  // when its result was saved
  bool is_read = false;  // an op that is not saved has read it, and Python knows
};

struct IdTables {
  ska::flat_hash_map<int64_t, int64_t> by_storage;  // address of a storage -> value id
  ska::flat_hash_map<int64_t, ValueInfo> values;    // by value id
  ska::flat_hash_map<int64_t, int64_t> foreign;     // address -> value id, of what comes from outside of the region
  ska::flat_hash_map<int64_t, int64_t> moved;       // address -> how much larger its offset was in forward
  ska::flat_hash_map<int64_t, SavedStorage> saved;  // of a forward: by address
  ska::flat_hash_set<int64_t> parameter_addresses;
  std::vector<int64_t> recent;  // of a forward: addresses of what autograd has saved since the last op
  std::vector<c10::weak_intrusive_ptr<StorageImpl>> storages;  // so that no other storage gets their addresses
  // Of `foreign`. They stay as long as a view does: see `RerunState.external_storages`.
  std::vector<c10::weak_intrusive_ptr<StorageImpl>> foreign_storages;
  std::vector<Owned> owned;     // producers that Python has named, and the call sites of the others

  const ValueInfo* find(int64_t id) const {
    const auto found = values.find(id);
    return found != values.end() ? &found->second : nullptr;
  }
  bool is_recent(int64_t address) const { return std::find(recent.begin(), recent.end(), address) != recent.end(); }
  bool is_persistent(const ValueInfo* info) const {
    return info != nullptr && (info->is_parameter || (info->is_input && !info->is_elsewhere));
  }
  void watch(StorageImpl* storage) {
    storages.push_back(c10::weak_intrusive_ptr<StorageImpl>::reclaim_copy(storage));
  }
};

inline int64_t address_of(const StorageImpl* storage) { return reinterpret_cast<int64_t>(storage); }

// -- A view of one of the tables, for Python

enum class Table : int {
  BY_STORAGE, MOVED, SAVED, MADE_OF, PRODUCERS,                                       // dictionaries
  EXTERNAL, PARAMETERS, INPUTS, ELSEWHERE, PARAMETER_ADDRESSES, RECENT, STORAGES,     // sets
};
constexpr int TABLES = 12;

struct IdView {
  PyObject_HEAD
  std::shared_ptr<IdTables>* tables;
  Table table;
};

inline PyTypeObject* IdViewType = nullptr;

inline PyObject* id_view(const std::shared_ptr<IdTables>& tables, Table table) {
  auto* self = reinterpret_cast<IdView*>(IdViewType->tp_alloc(IdViewType, 0));
  if (self == nullptr) throw python_error();
  self->tables = new std::shared_ptr<IdTables>(tables);
  self->table = table;
  return reinterpret_cast<PyObject*>(self);
}

inline void id_view_dealloc(IdView* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->tables;
  type->tp_free(self);
  Py_DECREF(type);
}

inline bool* flag_in(ValueInfo& info, Table table) {
  switch (table) {
    case Table::EXTERNAL: return &info.is_external;
    case Table::PARAMETERS: return &info.is_parameter;
    case Table::INPUTS: return &info.is_input;
    case Table::ELSEWHERE: return &info.is_elsewhere;
    default: return nullptr;
  }
}

// What a view has under a key: a new reference; nullptr without an error if it has nothing.
inline PyObject* entry_of(IdView* self, int64_t key) {
  IdTables& t = **self->tables;
  const auto number = [key](const auto& table) {
    const auto found = table.find(key);
    return found != table.end() ? checked(PyLong_FromLongLong(found->second)) : nullptr;
  };
  ValueInfo* info = nullptr;
  if (const auto found = t.values.find(key); found != t.values.end()) info = &found->second;
  switch (self->table) {
    case Table::BY_STORAGE: return number(t.by_storage);
    case Table::MOVED: return number(t.moved);
    case Table::SAVED: {
      const auto found = t.saved.find(key);
      return found != t.saved.end() ? checked(PyLong_FromLongLong(found->second.version)) : nullptr;
    }
    case Table::MADE_OF:
      return info != nullptr && info->made_of >= 0 ? checked(PyLong_FromLongLong(info->made_of)) : nullptr;
    case Table::PRODUCERS: return info != nullptr && info->producer != nullptr ? Py_NewRef(info->producer) : nullptr;
    case Table::PARAMETER_ADDRESSES: return t.parameter_addresses.count(key) > 0 ? Py_NewRef(Py_True) : nullptr;
    case Table::RECENT: return t.is_recent(key) ? Py_NewRef(Py_True) : nullptr;
    case Table::STORAGES: return nullptr;
    default: return info != nullptr && *flag_in(*info, self->table) ? Py_NewRef(Py_True) : nullptr;
  }
}

inline int64_t key_of(PyObject* key) {
  const int64_t number = PyLong_AsLongLong(key);
  if (number == -1 && PyErr_Occurred() != nullptr) throw python_error();
  return number;
}

inline void put_entry(IdView* self, int64_t key, PyObject* value) {
  IdTables& t = **self->tables;
  switch (self->table) {
    case Table::BY_STORAGE: t.by_storage[key] = key_of(value); break;
    case Table::MOVED: t.moved[key] = key_of(value); break;
    case Table::SAVED: t.saved[key] = SavedStorage{key_of(value)}; break;
    case Table::MADE_OF: t.values[key].made_of = key_of(value); break;
    default:
      t.owned.emplace_back(Py_NewRef(value));
      t.values[key].producer = value;
  }
}

inline int id_view_contains(IdView* self, PyObject* key) {
  try {
    if (key == Py_None) return 0;
    return Owned(entry_of(self, key_of(key))).get() != nullptr;
  } catch (python_error& error) {
    error.restore();
    return -1;
  }
}

inline PyObject* id_view_get(IdView* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* found = args[0] != Py_None ? entry_of(self, key_of(args[0])) : nullptr;
  return found != nullptr ? found : Py_NewRef(count > 1 ? args[1] : Py_None);
  END_HANDLE_TH_ERRORS
}

inline PyObject* id_view_item(IdView* self, PyObject* key) {
  HANDLE_TH_ERRORS
  PyObject* found = entry_of(self, key_of(key));
  if (found == nullptr) PyErr_SetObject(PyExc_KeyError, key);
  return found;
  END_HANDLE_TH_ERRORS
}

inline int id_view_put(IdView* self, PyObject* key, PyObject* value) {
  try {
    if (value == nullptr) {
      PyErr_SetString(PyExc_TypeError, "use pop");
      return -1;
    }
    put_entry(self, key_of(key), value);
    return 0;
  } catch (python_error& error) {
    error.restore();
    return -1;
  }
}

inline PyObject* id_view_setdefault(IdView* self, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const int64_t key = key_of(args[0]);
  if (PyObject* found = entry_of(self, key)) return found;
  put_entry(self, key, args[1]);
  return Py_NewRef(args[1]);
  END_HANDLE_TH_ERRORS
}

// Of `SAVED`.
inline PyObject* id_view_pop(IdView* self, PyObject* key) {
  HANDLE_TH_ERRORS
  (*self->tables)->saved.erase(key_of(key));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* id_view_clear(IdView* self, PyObject*) {  // of `SAVED` and `RECENT`
  IdTables& t = **self->tables;
  self->table == Table::SAVED ? t.saved.clear() : t.recent.clear();
  Py_RETURN_NONE;
}

// Of a set; to `STORAGES` a storage is added, as to `WeakStorages`.
inline PyObject* id_view_add(IdView* self, PyObject* key) {
  HANDLE_TH_ERRORS
  IdTables& t = **self->tables;
  if (self->table == Table::STORAGES) {
    Owned address(checked(PyObject_GetAttrString(key, "_cdata")));
    t.watch(reinterpret_cast<StorageImpl*>(key_of(address.get())));
  } else if (self->table == Table::PARAMETER_ADDRESSES) {
    t.parameter_addresses.insert(key_of(key));
  } else if (self->table == Table::RECENT) {
    t.recent.push_back(key_of(key));
  } else {
    *flag_in(t.values[key_of(key)], self->table) = true;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* id_view_watch(IdView* self, PyObject* object) {  // of `STORAGES`: see `WeakStorages.watch`
  HANDLE_TH_ERRORS
  const Tensor& tensor = THPVariable_Unpack(object);
  StorageImpl* storage = tensor.layout() == at::kStrided ? storage_of(tensor.unsafeGetTensorImpl()) : nullptr;
  if (storage != nullptr) (*self->tables)->watch(storage);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* id_view_isdisjoint(IdView* self, PyObject* keys) {
  HANDLE_TH_ERRORS
  Owned list(checked(PySequence_List(keys)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); i++)
    if (Owned(entry_of(self, key_of(PyList_GET_ITEM(list.get(), i)))).get() != nullptr) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* id_view_keys(IdView* self, PyObject*) { return Py_NewRef(reinterpret_cast<PyObject*>(self)); }

inline PyObject* id_view_list(IdView* self, PyObject*) {  // of `PARAMETER_ADDRESSES`, which alone is gone through
  HANDLE_TH_ERRORS
  Owned list(checked(PyList_New(0)));
  for (const int64_t address : (*self->tables)->parameter_addresses) {
    Owned key(checked(PyLong_FromLongLong(address)));
    if (PyList_Append(list.get(), key.get()) < 0) return nullptr;
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* id_view_iter(IdView* self) {
  Owned list(id_view_list(self, nullptr));
  return list ? PyObject_GetIter(list.get()) : nullptr;
}

inline Py_ssize_t id_view_length(IdView* self) {  // of those tables whose length is asked for
  const IdTables& t = **self->tables;
  switch (self->table) {
    case Table::MOVED: return static_cast<Py_ssize_t>(t.moved.size());
    case Table::SAVED: return static_cast<Py_ssize_t>(t.saved.size());
    case Table::RECENT: return static_cast<Py_ssize_t>(t.recent.size());
    default: return 1;
  }
}

// -- What autograd has saved in a forward, as `RerunState.pack` describes it

struct Packed {
  int64_t id;  // value id
  PyObject* maker;  // the call site of the op that produced the value; nullptr if none did
  int64_t offset;
  int bits;
  bool is_compared;
  bool is_external;
};

struct Packs {
  PyObject_HEAD
  std::vector<Packed>* list;
};

inline PyTypeObject* PacksType = nullptr;

inline PyObject* new_packs() {
  auto* self = reinterpret_cast<Packs*>(PacksType->tp_alloc(PacksType, 0));
  if (self == nullptr) throw python_error();
  self->list = new std::vector<Packed>();
  return reinterpret_cast<PyObject*>(self);
}

inline void packs_dealloc(Packs* self) {
  PyTypeObject* type = Py_TYPE(self);
  for (const Packed& one : *self->list) Py_XDECREF(one.maker);
  delete self->list;
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* packs_append(Packs* self, PyObject* description) {
  HANDLE_TH_ERRORS
  PyObject *id = nullptr, *maker = nullptr;
  int is_external = 0, bits = 0;
  long long offset = 0;
  if (!PyArg_ParseTuple(description, "OpOLi", &id, &is_external, &maker, &offset, &bits)) return nullptr;
  const bool is_compared = id != Py_None;
  self->list->push_back(Packed{is_compared ? key_of(id) : 0, maker != Py_None ? Py_NewRef(maker) : nullptr, offset,
                               bits, is_compared, is_external != 0});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline Py_ssize_t packs_length(Packs* self) { return static_cast<Py_ssize_t>(self->list->size()); }

inline PyObject* packs_item(Packs* self, Py_ssize_t index) {
  if (index < 0 || index >= packs_length(self)) {
    PyErr_SetNone(PyExc_IndexError);
    return nullptr;
  }
  const Packed& one = (*self->list)[index];
  PyObject* id = one.is_compared ? PyLong_FromLongLong(one.id) : Py_NewRef(Py_None);
  return Py_BuildValue("(NOOLi)", id, one.is_external ? Py_True : Py_False,
                       one.maker != nullptr ? one.maker : Py_None, static_cast<long long>(one.offset), one.bits);
}

}  // namespace sac
