// State of tensors and storages, read in one pass: the loops of module_state.py in sac/region and of tensors.py, which
// are the reference. A function returns None if it meets what it does not know; Python then does the same.
#pragma once

#include "walk.h"

#include <cstring>

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Storage.h>

namespace sac {

// The tensor behind a plain object; nullptr for those of subclasses, other than parameters, and for all else.
inline TensorImpl* plain_tensor(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (reinterpret_cast<PyObject*>(type) != THPVariableClass && reinterpret_cast<PyObject*>(type) != ParameterClass)
    return nullptr;
  return THPVariable_Unpack(object).unsafeGetTensorImpl();
}

// `ModuleState`: values. Returns the tensors among them, and whether each needs a gradient.
inline PyObject* tensor_states(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  const Py_ssize_t count = PyList_Size(values);
  Owned held(PyList_New(0)), needs(PyList_New(0));
  if (count < 0 || !held || !needs) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = PyList_GET_ITEM(values, i);
    if (value == Py_None) continue;
    const TensorImpl* impl = plain_tensor(value);
    if (impl == nullptr) Py_RETURN_NONE;
    if (PyList_Append(held.get(), value) < 0 ||
        PyList_Append(needs.get(), impl->requires_grad() ? Py_True : Py_False) < 0)
      return nullptr;
  }
  return PyTuple_Pack(2, held.get(), needs.get());
  END_HANDLE_TH_ERRORS
}

// Tensors. Returns the address and the bytes of the storage of each.
inline PyObject* storages_of(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  const Py_ssize_t count = PyList_Size(tensors);
  Owned found(count < 0 ? nullptr : PyList_New(count));
  if (!found) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const TensorImpl* impl = plain_tensor(PyList_GET_ITEM(tensors, i));
    if (impl == nullptr || !impl->has_storage() || impl->unsafe_storage().unsafeGetStorageImpl() == nullptr)
      Py_RETURN_NONE;
    StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    PyObject* pair = Py_BuildValue("(Kn)", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(storage)),
                                   static_cast<Py_ssize_t>(storage->nbytes()));
    if (pair == nullptr) return nullptr;
    PyList_SET_ITEM(found.get(), i, pair);
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

inline bool is_in_memory(const StorageImpl& storage) {
  return storage.device_type() == c10::DeviceType::CPU && storage.nbytes() != 0 && storage.data() != nullptr;
}

// `copy_of`, for storages in the memory of the CPU.
inline PyObject* copy_of_storage(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != reinterpret_cast<PyObject*>(THPStorageClass)) Py_RETURN_NONE;
  const c10::Storage& storage = THPStorage_Unpack(object);
  if (!is_in_memory(*storage.unsafeGetStorageImpl())) Py_RETURN_NONE;
  auto copy = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(),
                                               c10::GetCPUAllocator(), /*resizable=*/true);
  std::memcpy(copy->mutable_data(), storage.data(), storage.nbytes());
  return THPStorage_Wrap(c10::Storage(std::move(copy)));
  END_HANDLE_TH_ERRORS
}

// `other_bytes`: two storages. Returns whether their bytes differ.
inline PyObject* other_bytes(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 2)) return nullptr;
  for (Py_ssize_t i = 0; i < 2; ++i)
    if (reinterpret_cast<PyObject*>(Py_TYPE(args[i])) != reinterpret_cast<PyObject*>(THPStorageClass)) Py_RETURN_NONE;
  const c10::Storage &one = THPStorage_Unpack(args[0]), &other = THPStorage_Unpack(args[1]);
  if (!is_in_memory(*one.unsafeGetStorageImpl()) || !is_in_memory(*other.unsafeGetStorageImpl()) ||
      one.nbytes() != other.nbytes())
    Py_RETURN_NONE;
  return PyBool_FromLong(std::memcmp(one.data(), other.data(), one.nbytes()) != 0);
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
