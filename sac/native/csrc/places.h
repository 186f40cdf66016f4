// What a tape notes of each handle that backward waits for: which value it is, and the checksum of that.
#pragma once

#include "checksum.h"

namespace sac {

struct SavedAt {
  int value = -1;  // -1: not noted
  Py_ssize_t time = 0;  // the number of the next entry
  uint32_t version = 0;
};

// For Python a table by handle, see `TapeRecorder._places`.
struct Places {
  PyObject_HEAD
  std::vector<SavedAt>* list;
};

// Checksums by handle, see `TapeRecorder.checksums`. Those that are not one number of the CPU are Python's.
struct Checksums {
  PyObject_HEAD
  std::vector<int64_t>* sums;
  PyObject* others;
};

constexpr int64_t NO_SUM = -1, OTHER_SUMS = -2;

inline PyTypeObject *PlacesType = nullptr, *ChecksumsType = nullptr;

template <typename Item>
Item& at_handle(std::vector<Item>& list, size_t handle, const Item& none) {
  if (handle >= list.capacity()) list.reserve(std::max<size_t>(64, 2 * handle));
  if (handle >= list.size()) list.resize(handle + 1, none);
  return list[handle];
}

// The number of a handle; -1, with an error set, if it is none.
inline Py_ssize_t handle_number(PyObject* key) {
  const Py_ssize_t number = PyLong_AsSsize_t(key);
  if (number < 0 && PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, key);
  return number;
}

template <typename IsThere>
PyObject* numbers_of(size_t count, IsThere is_there) {
  HANDLE_TH_ERRORS
  Owned found(checked(PyList_New(0)));
  for (size_t i = 0; i < count; i++)
    if (is_there(i) && PyList_Append(found.get(), Owned(checked(PyLong_FromSize_t(i))).get()) < 0) return nullptr;
  return found.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* iterated(PyObject* list) {  // steals it
  if (list == nullptr) return nullptr;
  PyObject* found = PyObject_GetIter(list);
  Py_DECREF(list);
  return found;
}

inline int refuse_deletion() {
  PyErr_SetString(PyExc_TypeError, "nothing is deleted from this table");
  return -1;
}

// -- Places

inline PyObject* places_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Places*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->list = new std::vector<SavedAt>();
  return reinterpret_cast<PyObject*>(self);
}

inline void places_dealloc(Places* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->list;
  type->tp_free(self);
  Py_DECREF(type);
}

inline const SavedAt* place_of(const Places& places, Py_ssize_t handle) {
  if (handle < 0 || static_cast<size_t>(handle) >= places.list->size()) return nullptr;
  const SavedAt& found = (*places.list)[static_cast<size_t>(handle)];
  return found.value >= 0 ? &found : nullptr;
}

inline PyObject* as_tuple(const SavedAt& place) { return Py_BuildValue("(inI)", place.value, place.time, place.version); }

inline PyObject* places_item(Places* self, PyObject* key) {
  const Py_ssize_t handle = handle_number(key);
  if (handle < 0) return nullptr;
  if (const SavedAt* found = place_of(*self, handle)) return as_tuple(*found);
  PyErr_SetObject(PyExc_KeyError, key);
  return nullptr;
}

inline PyObject* places_get(Places* self, PyObject* key) {
  const Py_ssize_t handle = handle_number(key);
  if (handle < 0) return nullptr;
  const SavedAt* found = place_of(*self, handle);
  if (found != nullptr) return as_tuple(*found);
  Py_RETURN_NONE;
}

inline int places_put(Places* self, PyObject* key, PyObject* value) {
  if (value == nullptr) return refuse_deletion();
  const Py_ssize_t handle = handle_number(key);
  SavedAt place;
  if (handle < 0 || !PyArg_ParseTuple(value, "inI", &place.value, &place.time, &place.version)) return -1;
  at_handle(*self->list, static_cast<size_t>(handle), SavedAt()) = place;
  return 0;
}

inline int places_contains(Places* self, PyObject* key) {
  const Py_ssize_t handle = handle_number(key);
  return handle < 0 ? -1 : place_of(*self, handle) != nullptr;
}

inline PyObject* places_keys(Places* self, PyObject*) {
  return numbers_of(self->list->size(), [&](size_t i) { return (*self->list)[i].value >= 0; });
}

inline PyObject* places_iter(Places* self) { return iterated(places_keys(self, nullptr)); }

inline PyObject* places_compare(Places* self, PyObject* object, int how) {
  if ((how != Py_EQ && how != Py_NE) || Py_TYPE(object) != PlacesType) Py_RETURN_NOTIMPLEMENTED;
  const auto &a = *self->list, &b = *reinterpret_cast<Places*>(object)->list;
  const auto same = [](const SavedAt& one, const SavedAt& other) {
    if (one.value < 0 || other.value < 0) return (one.value < 0) == (other.value < 0);
    return one.value == other.value && one.time == other.time && one.version == other.version;
  };
  bool are_equal = true;
  for (size_t i = 0; are_equal && i < std::max(a.size(), b.size()); i++)
    are_equal = same(i < a.size() ? a[i] : SavedAt(), i < b.size() ? b[i] : SavedAt());
  return PyBool_FromLong(are_equal == (how == Py_EQ));
}

// -- Checksums

inline PyObject* checksums_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Checksums*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->sums = new std::vector<int64_t>();
  self->others = PyDict_New();
  if (self->others == nullptr) Py_CLEAR(self);
  return reinterpret_cast<PyObject*>(self);
}

inline void checksums_dealloc(Checksums* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->sums;
  Py_CLEAR(self->others);
  type->tp_free(self);
  Py_DECREF(type);
}

inline int64_t sum_of(const Checksums& all, Py_ssize_t handle) {
  return handle >= 0 && static_cast<size_t>(handle) < all.sums->size() ? (*all.sums)[static_cast<size_t>(handle)] : NO_SUM;
}

inline PyObject* checksums_item(Checksums* self, PyObject* key) {
  const Py_ssize_t handle = handle_number(key);
  if (handle < 0) return nullptr;
  const int64_t sum = sum_of(*self, handle);
  if (sum >= 0) return Py_BuildValue("(L)", static_cast<long long>(sum));
  PyObject* found = sum == OTHER_SUMS ? PyDict_GetItemWithError(self->others, key) : nullptr;
  if (found == nullptr && PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, key);
  return Py_XNewRef(found);
}

inline int checksums_put(Checksums* self, PyObject* key, PyObject* value) {
  if (value == nullptr) return refuse_deletion();
  const Py_ssize_t handle = handle_number(key);
  if (handle < 0) return -1;
  int64_t sum = OTHER_SUMS;
  if (PyTuple_Check(value) && PyTuple_GET_SIZE(value) == 1 && PyLong_Check(PyTuple_GET_ITEM(value, 0))) {
    int overflows = 0;
    sum = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(value, 0), &overflows);
    if (sum < 0 || overflows != 0) sum = OTHER_SUMS;
  }
  if (sum == OTHER_SUMS && PyDict_SetItem(self->others, key, value) < 0) return -1;
  at_handle(*self->sums, static_cast<size_t>(handle), NO_SUM) = sum;
  return 0;
}

inline int checksums_contains(Checksums* self, PyObject* key) {
  const Py_ssize_t handle = handle_number(key);
  return handle < 0 ? -1 : sum_of(*self, handle) != NO_SUM;
}

inline PyObject* checksums_keys(Checksums* self, PyObject*) {
  return numbers_of(self->sums->size(), [&](size_t i) { return (*self->sums)[i] != NO_SUM; });
}

inline PyObject* checksums_iter(Checksums* self) { return iterated(checksums_keys(self, nullptr)); }

inline Py_ssize_t checksums_length(Checksums* self) {
  return std::count_if(self->sums->begin(), self->sums->end(), [](int64_t sum) { return sum != NO_SUM; });
}

// A list of pairs of handle and value, the checksums by handle, whether strides may differ: return the pairs that differ,
// and those that Python has to compare.
inline PyObject* find_different(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto& all = *reinterpret_cast<Checksums*>(args[1]);
  Owned different(checked(PyList_New(0))), others(checked(PyList_New(0)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
    PyObject* pair = PyList_GET_ITEM(args[0], i);
    PyObject *key = PyTuple_GetItem(pair, 0), *value = PyTuple_GetItem(pair, 1);
    if (key == nullptr || value == nullptr) return nullptr;
    const int64_t then = sum_of(all, PyLong_AsSsize_t(key));
    const int64_t now = then >= 0 && THPVariable_Check(value)
                            ? checksum_of(THPVariable_Unpack(value), args[2] == Py_True)
                            : -1;
    PyObject* list = now < 0 ? others.get() : now != then ? different.get() : nullptr;
    if (list != nullptr && PyList_Append(list, pair) < 0) return nullptr;
  }
  return PyTuple_Pack(2, different.get(), others.get());
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
