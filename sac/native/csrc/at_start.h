// The parameters and the small tensors of a region when its forward began: `ModuleState` of module_state.py in sac/region
// while nothing has been written to. Once something has, Python makes its own records of what this one holds.
#pragma once

#include "marks.h"
#include "state.h"

#include <unordered_set>

namespace sac {

// See `Spare` of module_state.py.
struct SpareTensor {
  PyObject* object;  // owned by `AtStart`
  Tensor tensor;
  Py_ssize_t version;
  c10::Storage storage;
  size_t bytes;
  int64_t offset;
  c10::DimVector sizes, strides;
  c10::Storage copy;  // null if the storage is too large

  bool is_as_at_start() const {
    const TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (version_at(tensor) != version || storage_of(impl) != storage.unsafeGetStorageImpl() || storage.nbytes() != bytes)
      return false;
    return !copy || bytes == 0 || std::memcmp(copy.data(), storage.data(), bytes) == 0;
  }
};

struct AtStart {
  PyObject_HEAD
  PyObject* held;    // the parameters of the region's modules
  PyObject* needs;   // whether each needs a gradient
  PyObject* marked;  // these, and parameters that the region can reach besides
  std::vector<int64_t>* marks;
  Contents* contents;  // of `marked`, until the forward is over; null if nothing can be exchanged unseen
  std::vector<SpareTensor>* spares;
};

inline PyTypeObject* AtStartType = nullptr;

inline int at_start_traverse(AtStart* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->held);
  Py_VISIT(self->needs);
  Py_VISIT(self->marked);
  if (self->spares != nullptr)
    for (const SpareTensor& one : *self->spares) Py_VISIT(one.object);
  return 0;
}

inline int at_start_clear(AtStart* self) {
  Py_CLEAR(self->held);
  Py_CLEAR(self->needs);
  Py_CLEAR(self->marked);
  delete std::exchange(self->marks, nullptr);
  delete std::exchange(self->contents, nullptr);
  const std::unique_ptr<std::vector<SpareTensor>> spares(std::exchange(self->spares, nullptr));
  if (spares)
    for (const SpareTensor& one : *spares) Py_DECREF(one.object);
  return 0;
}

inline void at_start_dealloc(AtStart* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  at_start_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

enum class Spared { TAKEN, SKIPPED, UNKNOWN };

// Add a tensor that the region may write to, with a copy of its storage if that has at most `most` bytes.
inline Spared add_spare(std::vector<SpareTensor>& spares, PyObject* object, size_t most, bool is_buffer) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) {
    // A fake tensor counts as plain, and Python knows how.
    const bool is_known = !THPVariable_Check(object) || reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass;
    return is_known ? Spared::SKIPPED : Spared::UNKNOWN;
  }
  const Tensor& tensor = THPVariable_Unpack(object);
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!is_plain(impl) || impl->has_symbolic_sizes_strides()) return Spared::UNKNOWN;
  if (tensor.layout() != c10::kStrided) return Spared::SKIPPED;
  if (storage_of(impl) == nullptr || (!is_buffer && impl->requires_grad())) return Spared::UNKNOWN;
  if (!is_buffer && tensor.is_inference()) return Spared::SKIPPED;
  for (const SpareTensor& one : spares)
    if (!is_buffer && one.object == object) return Spared::SKIPPED;
  const c10::Storage& storage = impl->unsafe_storage();
  const size_t bytes = storage.nbytes();
  c10::Storage copy;
  if (bytes <= most) {
    if (!is_in_memory(*storage.unsafeGetStorageImpl())) return Spared::UNKNOWN;
    copy = copy_in_memory(storage);
  }
  spares.push_back(SpareTensor{Py_NewRef(object), tensor, version_at(tensor), storage, bytes, impl->storage_offset(),
                               c10::DimVector(impl->sizes()), c10::DimVector(impl->strides()), std::move(copy)});
  return Spared::TAKEN;
}

// `ModuleState`: parameters or None each (a list); more parameters (a list); pairs of a module and its buffers (a list);
// other tensors that the region can reach (a tuple); the bytes of the largest storage that is copied; whether data and
// gradients of parameters are held. Returns None if one of them is not a plain tensor.
inline PyObject* at_start(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 6)) return nullptr;
  Owned made(checked(AtStartType->tp_alloc(AtStartType, 0)));
  auto* self = reinterpret_cast<AtStart*>(made.get());
  Owned states(checked(tensor_states(nullptr, args[0])));
  if (states.get() == Py_None) Py_RETURN_NONE;
  self->held = Py_NewRef(PyTuple_GET_ITEM(states.get(), 0));
  self->needs = Py_NewRef(PyTuple_GET_ITEM(states.get(), 1));
  self->marked = Py_NewRef(self->held);
  if (PyList_Size(args[1]) != 0) {
    Py_SETREF(self->marked, checked(PyList_GetSlice(self->held, 0, PyList_GET_SIZE(self->held))));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
      PyObject* one = PyList_GET_ITEM(args[1], i);
      if (plain_tensor(one) == nullptr) Py_RETURN_NONE;
      bool is_own = false;
      for (Py_ssize_t k = 0; !is_own && k < PyList_GET_SIZE(self->held); ++k)
        is_own = PyList_GET_ITEM(self->held, k) == one;
      if (!is_own && PyList_Append(self->marked, one) < 0) return nullptr;
    }
  }
  self->marks = new std::vector<int64_t>(marks_of(self->marked));
  if (args[5] == Py_True) self->contents = new Contents(contents_of(self->marked));
  self->spares = new std::vector<SpareTensor>();
  const size_t most = PyLong_AsSize_t(args[4]);
  for (Py_ssize_t i = 0; i < PyList_Size(args[2]); ++i) {
    PyObject *bound = PyTuple_GetItem(PyList_GET_ITEM(args[2], i), 1), *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; bound != nullptr && PyDict_Next(bound, &at, &name, &value);)
      if (add_spare(*self->spares, value, most, true) == Spared::UNKNOWN) Py_RETURN_NONE;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(args[3]); ++i)
    if (add_spare(*self->spares, PyTuple_GET_ITEM(args[3], i), most, false) == Spared::UNKNOWN) Py_RETURN_NONE;
  return PyErr_Occurred() ? nullptr : made.release();
  END_HANDLE_TH_ERRORS
}

inline bool spares_are_same(const AtStart* self) {
  for (const SpareTensor& one : *self->spares)
    if (!one.is_as_at_start()) return false;
  return true;
}

// The forward is over. Returns whether it has changed nothing; if so, what only changes need is released, and copies of
// more than `most` bytes are.
inline PyObject* at_start_close(AtStart* self, PyObject* most) {
  HANDLE_TH_ERRORS
  const size_t largest = PyLong_AsSize_t(most);
  if (PyErr_Occurred()) return nullptr;
  if (marks_of(self->marked) != *self->marks || !spares_are_same(self)) Py_RETURN_FALSE;
  delete std::exchange(self->contents, nullptr);
  for (SpareTensor& one : *self->spares)
    if (one.bytes > largest) one.copy = c10::Storage();
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// Whether nothing has been written to the small tensors, nor has any other storage now.
inline PyObject* at_start_has_same_tensors(AtStart* self, PyObject*) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(spares_are_same(self));
  END_HANDLE_TH_ERRORS
}

// Whether no parameter of the region's modules has been written to in place since the marks were noted.
inline PyObject* at_start_has_same_versions(AtStart* self, PyObject*) {
  HANDLE_TH_ERRORS
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->held); ++i)
    if (version_at(THPVariable_Unpack(PyList_GET_ITEM(self->held, i))) != (*self->marks)[i * MARK]) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// Whether one of these addresses is that of a storage of which there is no copy.
inline PyObject* at_start_lacks_copy(AtStart* self, PyObject* addresses) {
  HANDLE_TH_ERRORS
  std::unordered_set<const StorageImpl*> wanted;
  for (Py_ssize_t i = 0; i < PyList_Size(addresses); ++i)
    wanted.insert(static_cast<StorageImpl*>(PyLong_AsVoidPtr(PyList_GET_ITEM(addresses, i))));
  if (PyErr_Occurred() != nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->held); ++i) {
    const StorageImpl* storage = storage_of(THPVariable_Unpack(PyList_GET_ITEM(self->held, i)).unsafeGetTensorImpl());
    if (storage == nullptr || wanted.count(storage) != 0) Py_RETURN_TRUE;
  }
  for (const SpareTensor& one : *self->spares)
    if (!one.copy && wanted.count(one.storage.unsafeGetStorageImpl()) != 0) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* at_start_note(AtStart* self, PyObject*) {  // `ModuleState.note_parameters`
  HANDLE_TH_ERRORS
  *self->marks = marks_of(self->marked);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The contents of parameters for Python, as `leaf_contents` returns them; they are its own from now on.
inline PyObject* at_start_contents(AtStart* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (self->contents == nullptr) Py_RETURN_NONE;
  PyObject* capsule = PyCapsule_New(self->contents, "sac.contents", contents_free);
  if (capsule != nullptr) self->contents = nullptr;
  return capsule;
  END_HANDLE_TH_ERRORS
}

// The small tensors, each with its version, its storage, its place there (`place_of`), the bytes of the storage, and
// the copy of that or None.
inline PyObject* at_start_spares(AtStart* self, PyObject*) {
  HANDLE_TH_ERRORS
  Owned found(checked(PyList_New(0)));
  for (const SpareTensor& one : *self->spares) {
    Owned shape(checked(PyTuple_New(static_cast<Py_ssize_t>(one.sizes.size()))));
    Owned strides(checked(PyTuple_New(static_cast<Py_ssize_t>(one.strides.size()))));
    for (size_t i = 0; i < one.sizes.size(); ++i) {
      PyTuple_SET_ITEM(shape.get(), static_cast<Py_ssize_t>(i), checked(PyLong_FromLongLong(one.sizes[i])));
      PyTuple_SET_ITEM(strides.get(), static_cast<Py_ssize_t>(i), checked(PyLong_FromLongLong(one.strides[i])));
    }
    Owned storage(checked(THPStorage_Wrap(one.storage)));
    Owned copy(checked(one.copy ? THPStorage_Wrap(one.copy) : Py_NewRef(Py_None)));
    Owned item(checked(Py_BuildValue("(OnO(LOO)nO)", one.object, one.version, storage.get(),
                                     static_cast<long long>(one.offset), shape.get(), strides.get(),
                                     static_cast<Py_ssize_t>(one.bytes), copy.get())));
    if (PyList_Append(found.get(), item.get()) < 0) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* at_start_trained(AtStart* self, void*) {  // the small tensors that need a gradient now
  HANDLE_TH_ERRORS
  Owned found(checked(PyList_New(0)));
  for (const SpareTensor& one : *self->spares)
    if (one.tensor.requires_grad() && PyList_Append(found.get(), one.object) < 0) return nullptr;
  return found.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* at_start_marks(AtStart* self, void*) { return marks_as_bytes(*self->marks); }

inline PyMemberDef at_start_members[] = {
    {"held", T_OBJECT, offsetof(AtStart, held), READONLY, nullptr},
    {"needs", T_OBJECT, offsetof(AtStart, needs), READONLY, nullptr},
    {"marked", T_OBJECT, offsetof(AtStart, marked), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

inline PyGetSetDef at_start_getset[] = {
    {"marks", reinterpret_cast<getter>(at_start_marks), nullptr, nullptr, nullptr},
    {"trained", reinterpret_cast<getter>(at_start_trained), nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace sac
