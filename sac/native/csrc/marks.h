// What a forward may change of parameters besides their values: see Note [Marks of parameters] in sac/region/marks.py.
#pragma once

#include "tape.h"
#include "walk.h"

#include <c10/util/hash.h>

namespace sac {

// A plain parameter: not a fake one, nor one of a subclass, whose data lie in other tensors.
inline bool has_own_data(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass &&
         THPVariable_Unpack(object).layout() == c10::kStrided;
}

constexpr size_t MARK = 5;  // the numbers of a `Mark`, of which the first is the version

inline Py_ssize_t version_at(const Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

// `marks_of`: of a list of tensors, five numbers each.
inline std::vector<int64_t> marks_of(PyObject* list) {
  const auto count = static_cast<size_t>(PyList_GET_SIZE(list));
  std::vector<int64_t> marks(count * MARK);
  int64_t* at = marks.data();
  for (size_t i = 0; i < count; i++, at += MARK) {
    PyObject* object = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
    const Tensor& tensor = THPVariable_Unpack(object);
    at[0] = version_at(tensor);
    if (!has_own_data(object)) continue;
    at[1] = reinterpret_cast<intptr_t>(storage_of(tensor.unsafeGetTensorImpl()));
    size_t place = c10::hash_combine(1, static_cast<size_t>(tensor.storage_offset()));
    for (const int64_t size : tensor.sizes()) place = c10::hash_combine(place, static_cast<size_t>(size));
    for (const int64_t stride : tensor.strides()) place = c10::hash_combine(place, static_cast<size_t>(stride));
    at[2] = static_cast<int64_t>(place);
    const Tensor& grad = tensor.unsafeGetTensorImpl()->grad();
    if (!grad.defined()) continue;
    at[3] = reinterpret_cast<intptr_t>(grad.unsafeGetTensorImpl());
    at[4] = version_at(grad);
  }
  return marks;
}

inline PyObject* marks_as_bytes(const std::vector<int64_t>& marks) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(marks.data()),
                                   static_cast<Py_ssize_t>(marks.size() * sizeof(int64_t)));
}

inline PyObject* leaf_marks(PyObject*, PyObject* list) {
  HANDLE_TH_ERRORS
  if (PyList_Size(list) < 0) return nullptr;
  return marks_as_bytes(marks_of(list));
  END_HANDLE_TH_ERRORS
}

// What tensors hold at one time: their data, and their gradients.
using Contents = std::vector<std::pair<Tensor, Tensor>>;

inline void contents_free(PyObject* capsule) {
  delete static_cast<Contents*>(PyCapsule_GetPointer(capsule, "sac.contents"));
}

inline Contents contents_of(PyObject* list) {
  Contents contents;
  contents.reserve(static_cast<size_t>(PyList_GET_SIZE(list)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    TensorImpl* impl = THPVariable_Unpack(PyList_GET_ITEM(list, i)).unsafeGetTensorImpl();
    contents.emplace_back();
    if (!has_own_data(PyList_GET_ITEM(list, i))) continue;
    contents.back().first = Tensor(impl->shallow_copy_and_detach(c10::VariableVersion(0), false));
    contents.back().second = impl->grad();
  }
  return contents;
}

// `contents_of`: holds the data and the gradients of a list of tensors.
inline PyObject* leaf_contents(PyObject*, PyObject* list) {
  HANDLE_TH_ERRORS
  if (PyList_Size(list) < 0) return nullptr;
  auto contents = std::make_unique<Contents>(contents_of(list));
  PyObject* capsule = PyCapsule_New(contents.get(), "sac.contents", contents_free);
  if (capsule != nullptr) contents.release();
  return capsule;
  END_HANDLE_TH_ERRORS
}

// The data and the gradient of the tensor at a position of `leaf_contents`; None for what it does not have.
inline PyObject* contents_at(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 2)) return nullptr;
  auto* contents = static_cast<Contents*>(PyCapsule_GetPointer(args[0], "sac.contents"));
  const size_t position = PyLong_AsSize_t(args[1]);
  if (contents == nullptr || PyErr_Occurred()) return nullptr;
  const auto& [data, grad] = contents->at(position);
  return Py_BuildValue("NN", THPVariable_Wrap(data), THPVariable_Wrap(grad));
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
