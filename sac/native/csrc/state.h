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

// Whether no hook is registered in a table of a tensor.
inline bool has_no_hooks(PyObject* table) {
  return table == nullptr || table == Py_None || (PyDict_Check(table) && PyDict_Size(table) == 0);
}

inline bool is_bound(PyObject* bound, PyObject* wanted) {  // see module_state.py
  if (!PyDict_CheckExact(bound) || !PyDict_CheckExact(wanted) || PyDict_Size(bound) != PyDict_Size(wanted)) return false;
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(wanted, &at, &name, &value);)
    if (PyDict_GetItemWithError(bound, name) != value) return false;
  return true;
}

// `ModuleState.enter_on`: modules, whether each trains, pairs of a module and its buffers, tensors, whether each needs a
// gradient, leaves. Returns whether all of this is so, and the leaves have no hooks.
inline PyObject* modules_are_as(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  static PyObject* const table_name = PyUnicode_InternFromString("_buffers");
  if (!has_count(nargs, 6)) return nullptr;
  const Py_ssize_t modules = PyTuple_Size(args[0]), tables = PyList_Size(args[2]), tensors = PyList_Size(args[3]),
                   leaves = PyList_Size(args[5]);
  if (PyErr_Occurred() || PyList_Size(args[1]) != modules || PyList_Size(args[4]) != tensors)
    return PyErr_Occurred() ? nullptr : Py_NewRef(Py_False);
  for (Py_ssize_t i = 0; i < tensors; ++i) {
    const TensorImpl* impl = plain_tensor(PyList_GET_ITEM(args[3], i));
    if (impl == nullptr || impl->requires_grad() != (PyList_GET_ITEM(args[4], i) == Py_True)) Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < leaves; ++i) {
    PyObject* leaf = PyList_GET_ITEM(args[5], i);
    if (plain_tensor(leaf) == nullptr) Py_RETURN_FALSE;
    const auto* held = reinterpret_cast<THPVariable*>(leaf);
    if (!has_no_hooks(held->backward_hooks) || !has_no_hooks(held->post_accumulate_grad_hooks)) Py_RETURN_FALSE;
  }
  bool is_same = true;
  for (Py_ssize_t i = 0; is_same && i < modules; ++i) {
    Owned training(PyObject_GetAttr(PyTuple_GET_ITEM(args[0], i), words().training));
    is_same = training && training.get() == PyList_GET_ITEM(args[1], i);
  }
  for (Py_ssize_t i = 0; is_same && i < tables; ++i) {
    PyObject* pair = PyList_GET_ITEM(args[2], i);
    Owned bound(PyTuple_CheckExact(pair) ? PyObject_GetAttr(PyTuple_GET_ITEM(pair, 0), table_name) : nullptr);
    is_same = bound && is_bound(bound.get(), PyTuple_GET_ITEM(pair, 1));
  }
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
  }
  return PyBool_FromLong(is_same);
  END_HANDLE_TH_ERRORS
}

inline bool is_in_memory(const StorageImpl& storage) {
  return storage.device_type() == c10::DeviceType::CPU && storage.nbytes() != 0 && storage.data() != nullptr;
}

inline c10::Storage copy_in_memory(const c10::Storage& storage) {
  auto copy = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(),
                                               c10::GetCPUAllocator(), /*resizable=*/true);
  std::memcpy(copy->mutable_data(), storage.data(), storage.nbytes());
  return c10::Storage(std::move(copy));
}

// `copy_of`, for storages in the memory of the CPU.
inline PyObject* copy_of_storage(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != reinterpret_cast<PyObject*>(THPStorageClass)) Py_RETURN_NONE;
  const c10::Storage& storage = THPStorage_Unpack(object);
  if (!is_in_memory(*storage.unsafeGetStorageImpl())) Py_RETURN_NONE;
  return THPStorage_Wrap(copy_in_memory(storage));
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

// `Spare.was_changed`: a tensor, its storage at the start, its version and the bytes of its storage then, the copy of the
// storage or None. Returns whether it is as it was; None if Python has to find out.
inline PyObject* is_as_copied(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  constexpr size_t MOST = 1 << 16;  // as in module_state.py
  if (!has_count(nargs, 5)) return nullptr;
  auto* type = reinterpret_cast<PyObject*>(THPStorageClass);
  const TensorImpl* impl = plain_tensor(args[0]);
  if (impl == nullptr || !impl->has_storage() || reinterpret_cast<PyObject*>(Py_TYPE(args[1])) != type) Py_RETURN_NONE;
  const StorageImpl* storage = THPStorage_Unpack(args[1]).unsafeGetStorageImpl();
  const auto& counter = impl->version_counter();
  const int64_t version = PyLong_AsLongLong(args[2]), bytes = PyLong_AsLongLong(args[3]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if ((counter.enabled() ? counter.current_version() : 0) != version) Py_RETURN_FALSE;
  if (impl->unsafe_storage().unsafeGetStorageImpl() != storage || static_cast<int64_t>(storage->nbytes()) != bytes)
    Py_RETURN_FALSE;
  if (args[4] == Py_None || reinterpret_cast<PyObject*>(Py_TYPE(args[0])) != THPVariableClass) Py_RETURN_TRUE;
  if (reinterpret_cast<PyObject*>(Py_TYPE(args[4])) != type) Py_RETURN_NONE;
  const StorageImpl* copy = THPStorage_Unpack(args[4]).unsafeGetStorageImpl();
  if (!is_in_memory(*storage) || !is_in_memory(*copy) || copy->nbytes() != storage->nbytes() || copy->nbytes() > MOST)
    Py_RETURN_NONE;
  return PyBool_FromLong(std::memcmp(copy->data(), storage->data(), copy->nbytes()) == 0);
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
