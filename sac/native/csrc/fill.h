// The hooks of a region whose Python runs again: the forward makes handles, the recomputation fills them.
#pragma once

#include "handles.h"
#include "rerun.h"
#include "watch.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <utility>

namespace sac {

// -- Forward

struct FrameHooks {
  PyObject_HEAD
  Handles* handles;
  PyObject* handle_type;
  PyObject* frame;
  PyObject* recorder;  // None if none sees the region's ops
  // Without a recorder, until the forward is over: what autograd has saved, with its version at that time.
  std::vector<std::pair<Tensor, Py_ssize_t>>* packed;
};

inline PyObject* frame_hooks_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *handles = nullptr, *handle_type = nullptr, *frame = nullptr, *recorder = nullptr;
  if (!PyArg_ParseTuple(args, "OOOO", &handles, &handle_type, &frame, &recorder)) return nullptr;
  auto* self = reinterpret_cast<FrameHooks*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->handles = reinterpret_cast<Handles*>(Py_NewRef(handles));
  self->handle_type = Py_NewRef(handle_type);
  self->frame = Py_NewRef(frame);
  self->recorder = Py_NewRef(recorder);
  if (recorder == Py_None) self->packed = new std::vector<std::pair<Tensor, Py_ssize_t>>();
  return reinterpret_cast<PyObject*>(self);
}

inline int frame_hooks_traverse(FrameHooks* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->handle_type);
  Py_VISIT(self->frame);
  Py_VISIT(self->recorder);
  return 0;
}

inline void forget_packed(FrameHooks* self) {  // freeing a tensor may run Python, which may get here again
  std::unique_ptr<std::vector<std::pair<Tensor, Py_ssize_t>>> packed(std::exchange(self->packed, nullptr));
}

inline int frame_hooks_clear(FrameHooks* self) {
  forget_packed(self);
  Py_CLEAR(self->handles);
  Py_CLEAR(self->handle_type);
  Py_CLEAR(self->frame);
  Py_CLEAR(self->recorder);
  return 0;
}

inline void frame_hooks_dealloc(FrameHooks* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  frame_hooks_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Whether a tensor's metadata can be read here: it is of torch's own class, and no size is a symbol.
inline bool has_plain_metadata(PyObject* object, const Tensor& tensor) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  const TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return (type == THPVariableClass || type == ParameterClass) && is_plain(impl) && !impl->has_symbolic_sizes_strides();
}

inline void note_metadata(Handle* handle, PyObject* object, const Tensor& tensor) {
  if (has_plain_metadata(object, tensor)) {
    const auto sizes = tensor.sizes();
    handle->shape = checked(PyTuple_New(static_cast<Py_ssize_t>(sizes.size())));
    for (size_t i = 0; i < sizes.size(); i++)
      PyTuple_SET_ITEM(handle->shape, i, checked(PyLong_FromLongLong(sizes[i])));
    handle->dtype = Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
    handle->device = checked(THPDevice_New(tensor.device()));
    return;
  }
  handle->shape = checked(PyObject_GetAttrString(object, "shape"));
  handle->dtype = checked(PyObject_GetAttrString(object, "dtype"));
  handle->device = checked(PyObject_GetAttrString(object, "device"));
}

inline PyObject* frame_hooks_pack(FrameHooks* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const Tensor tensor = tensor_from(object);
  THPObjectPtr made = add_handle(self->handles, self->handle_type);
  auto* handle = reinterpret_cast<Handle*>(made.get());
  note_metadata(handle, object, tensor);
  if (self->packed != nullptr) {
    self->packed->emplace_back(tensor, tensor.is_inference() ? 0 : tensor._version());
    handle->storage = reinterpret_cast<unsigned long long>(storage_of(tensor.unsafeGetTensorImpl()));
  }
  if (self->recorder != Py_None && !pack_in_pass(self->recorder, object, handle))
    Owned(checked(PyObject_CallMethod(self->recorder, "pack", "OO", object, handle)));
  return made.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* frame_hooks_unpack(FrameHooks* self, PyObject* object) {
  HANDLE_TH_ERRORS
  PyObject* value = read_handle(reinterpret_cast<Handle*>(object));
  return value != nullptr ? value : PyObject_CallMethod(self->frame, "_unpack", "O", object);
  END_HANDLE_TH_ERRORS
}

// What autograd has saved as the handle with this index, and its version at that time.
inline PyObject* frame_hooks_packed(FrameHooks* self, Py_ssize_t index) {
  HANDLE_TH_ERRORS
  if (self->packed == nullptr || index < 0 || static_cast<size_t>(index) >= self->packed->size()) {
    PyErr_SetNone(PyExc_IndexError);
    return nullptr;
  }
  const auto& [tensor, version] = (*self->packed)[index];
  Owned wrapped(checked(THPVariable_Wrap(tensor)));
  return Py_BuildValue("(On)", wrapped.get(), version);
  END_HANDLE_TH_ERRORS
}

inline PyObject* frame_hooks_forget(FrameHooks* self, PyObject*) {
  forget_packed(self);
  Py_RETURN_NONE;
}

// -- Recomputation

// See `RecomputeProgress`.
struct Progress {
  PyObject_HEAD
  Handles* handles;
  PyObject* frame;
  PyObject* verify;
  PyObject* since_op;
  Py_ssize_t count;
  Py_ssize_t last_missing;
  Py_ssize_t task;
  char checks;
  char done;
  char early_stop;
  char stop_in_pack;
};

inline PyObject* progress_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"frame", "handles", "last_missing", "stop_in_pack", "task",
                                "early_stop", "checks", nullptr};
  PyObject *frame = nullptr, *handles = nullptr;
  Py_ssize_t last_missing = 0, task = 0;
  int stop_in_pack = 0, early_stop = 0, checks = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOn$pnpp", const_cast<char**>(names), &frame, &handles,
                                   &last_missing, &stop_in_pack, &task, &early_stop, &checks))
    return nullptr;
  auto* self = reinterpret_cast<Progress*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->handles = reinterpret_cast<Handles*>(Py_NewRef(handles));
  self->frame = Py_NewRef(frame);
  self->since_op = PyList_New(0);
  self->last_missing = last_missing;
  self->task = task;
  self->checks = static_cast<char>(checks);
  self->early_stop = static_cast<char>(early_stop);
  self->stop_in_pack = static_cast<char>(stop_in_pack);
  return reinterpret_cast<PyObject*>(self);
}

inline int progress_traverse(Progress* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->frame);
  Py_VISIT(self->verify);
  Py_VISIT(self->since_op);
  return 0;
}

inline int progress_clear(Progress* self) {
  Py_CLEAR(self->handles);
  Py_CLEAR(self->frame);
  Py_CLEAR(self->verify);
  Py_CLEAR(self->since_op);
  return 0;
}

inline void progress_dealloc(Progress* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  progress_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyMemberDef progress_members[] = {
    {"count", T_PYSSIZET, offsetof(Progress, count), READONLY, nullptr},
    {"done", T_BOOL, offsetof(Progress, done), READONLY, nullptr},
    {"early_stop", T_BOOL, offsetof(Progress, early_stop), READONLY, nullptr},
    {"frame", T_OBJECT, offsetof(Progress, frame), READONLY, nullptr},
    {"last_missing", T_PYSSIZET, offsetof(Progress, last_missing), READONLY, nullptr},
    {"since_op", T_OBJECT, offsetof(Progress, since_op), 0, nullptr},
    {"verify", T_OBJECT, offsetof(Progress, verify), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

// Do what `RecomputeProgress.after_op` does; return false if Python has to.
inline bool note_op(PyObject* progress) {
  if (!PyObject_TypeCheck(progress, ProgressType)) return false;
  PyObject* packed = reinterpret_cast<Progress*>(progress)->since_op;
  if (PyList_GET_SIZE(packed) > 0 && PyList_SetSlice(packed, 0, PyList_GET_SIZE(packed), nullptr) < 0)
    throw python_error();
  return true;
}

inline PyObject* detached(const Progress* self, PyObject* object, const Tensor& tensor) {
  if (!tensor.requires_grad()) return Py_NewRef(object);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (self->stop_in_pack || !(type == THPVariableClass || type == ParameterClass))
    return checked(PyObject_CallMethod(object, "detach", nullptr));
  return without_graph(tensor);
}

inline bool is_equal(PyObject* one, PyObject* other) {
  const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
  if (equal < 0) throw python_error();
  return equal == 1;
}

inline bool has_metadata_of(const Handle* handle, PyObject* object, const Tensor& tensor) {
  if (handle->shape == nullptr) return true;
  if (!has_plain_metadata(object, tensor)) {
    Owned shape(checked(PyObject_GetAttrString(object, "shape")));
    Owned dtype(checked(PyObject_GetAttrString(object, "dtype")));
    Owned device(checked(PyObject_GetAttrString(object, "device")));
    return is_equal(shape.get(), handle->shape) && is_equal(dtype.get(), handle->dtype) &&
           is_equal(device.get(), handle->device);
  }
  const auto sizes = tensor.sizes();
  if (PyTuple_GET_SIZE(handle->shape) != static_cast<Py_ssize_t>(sizes.size())) return false;
  for (size_t i = 0; i < sizes.size(); i++) {
    PyObject* size = PyTuple_GET_ITEM(handle->shape, i);
    if (!PyLong_Check(size) || PyLong_AsLongLong(size) != sizes[i]) return false;
  }
  return handle->dtype == reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())) &&
         reinterpret_cast<THPDevice*>(handle->device)->device == tensor.device();
}

// Do what `RecomputeProgress.pack` does; what is not usual is done by Python.
inline PyObject* progress_pack(Progress* self, PyObject* object) {
  HANDLE_TH_ERRORS
  THPObjectPtr saved(detached(self, object, THPVariable_Unpack(object)));
  if (!saved) return nullptr;
  const Tensor tensor = tensor_from(saved.get());
  const Py_ssize_t index = self->count++;
  if (self->done && self->early_stop) return saved.release();
  auto* python = reinterpret_cast<PyObject*>(self);
  if (index >= handles_length(self->handles))
    return PyObject_CallMethod(python, "refuse_surplus", "nO", index, saved.get());
  auto* handle = (*self->handles->list)[index];
  if (handle != nullptr && waits(handle, self->task)) {
    THPObjectPtr alive(Py_NewRef(reinterpret_cast<PyObject*>(handle)));  // Python runs below
    if (self->checks && !has_metadata_of(handle, saved.get(), tensor))
      return PyObject_CallMethod(python, "refuse_other", "OO", alive.get(), saved.get());
    Py_XSETREF(handle->value, Py_NewRef(saved.get()));
    if (self->verify != nullptr && self->verify != Py_None && !is_as_packed(self->verify, index, saved.get()))
      Owned(checked(PyObject_CallFunction(self->verify, "nO", index, saved.get())));
  }
  if (!self->stop_in_pack && PyList_Append(self->since_op, saved.get()) < 0) return nullptr;
  if (index >= self->last_missing) {
    self->done = 1;
    if (self->stop_in_pack && self->early_stop) return PyObject_CallMethod(python, "stop", nullptr);
  }
  return saved.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
