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
  // Inside torch.utils.checkpoint, otherwise nullptr: torch's two hooks, and the indices of what is kept.
  PyObject* their_pack;
  PyObject* their_unpack;
  PyObject* places;
  // Without a recorder, until the forward is over: what autograd has saved, with its version at that time.
  std::vector<std::pair<Tensor, Py_ssize_t>>* packed;
  unsigned long thread;  // the region's
};

inline PyObject* frame_hooks_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *handles = nullptr, *handle_type = nullptr, *frame = nullptr, *recorder = nullptr;
  PyObject *their_pack = nullptr, *their_unpack = nullptr, *places = nullptr;
  if (!PyArg_ParseTuple(args, "OOOO|OOO!", &handles, &handle_type, &frame, &recorder, &their_pack, &their_unpack,
                        &PySet_Type, &places))
    return nullptr;
  auto* self = reinterpret_cast<FrameHooks*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->handles = reinterpret_cast<Handles*>(Py_NewRef(handles));
  self->handle_type = Py_NewRef(handle_type);
  self->frame = Py_NewRef(frame);
  self->recorder = Py_NewRef(recorder);
  self->thread = PyThread_get_thread_ident();
  self->their_pack = Py_XNewRef(their_pack);
  self->their_unpack = Py_XNewRef(their_unpack);
  self->places = Py_XNewRef(places);
  if (recorder == Py_None) self->packed = new std::vector<std::pair<Tensor, Py_ssize_t>>();
  return reinterpret_cast<PyObject*>(self);
}

inline int frame_hooks_traverse(FrameHooks* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->handle_type);
  Py_VISIT(self->frame);
  Py_VISIT(self->recorder);
  Py_VISIT(self->their_pack);
  Py_VISIT(self->their_unpack);
  Py_VISIT(self->places);
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
  Py_CLEAR(self->their_pack);
  Py_CLEAR(self->their_unpack);
  Py_CLEAR(self->places);
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

// Let the recorder look at what autograd saves. If this thread was forked inside of the region, which will raise, it may
// not look into the tables of the region's own thread: the handle keeps the tensor.
inline void record_packed(FrameHooks* self, PyObject* object, Handle* handle) {
  if (self->thread != PyThread_get_thread_ident() && torch::autograd::get_current_graph_task_id() == -1) {
    handle->is_kept = 1;
    handle->value = Py_NewRef(object);
  } else if (!pack_in_pass(self->recorder, object, handle)) {
    Owned(checked(PyObject_CallMethod(self->recorder, "pack", "OO", object, handle)));
  }
}

inline PyObject* frame_hooks_pack(FrameHooks* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const Tensor tensor = tensor_from(object);
  THPObjectPtr made = add_handle(self->handles, self->handle_type);
  auto* handle = reinterpret_cast<Handle*>(made.get());
  if (self->their_pack == nullptr) note_metadata(handle, object, tensor);
  if (self->packed != nullptr) {
    self->packed->emplace_back(tensor, tensor.is_inference() ? 0 : tensor._version());
    handle->storage = reinterpret_cast<unsigned long long>(storage_of(tensor.unsafeGetTensorImpl()));
  }
  if (self->recorder != Py_None) record_packed(self, object, handle);
  if (self->their_pack == nullptr) return made.release();
  if (!handle->is_kept) return PyObject_CallOneArg(self->their_pack, object);
  Owned index(checked(PyLong_FromSsize_t(handle->index)));
  if (PySet_Add(self->places, index.get()) < 0) return nullptr;
  return made.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* frame_hooks_unpack(FrameHooks* self, PyObject* object) {
  HANDLE_TH_ERRORS
  if (self->their_unpack != nullptr && !PyObject_TypeCheck(object, HandleType))
    return PyObject_CallOneArg(self->their_unpack, object);
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
  std::vector<Tensor>* since_op;  // what autograd has saved since the last op
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
  self->since_op = new std::vector<Tensor>();
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
  return 0;
}

inline int progress_clear(Progress* self) {
  Py_CLEAR(self->handles);
  Py_CLEAR(self->frame);
  Py_CLEAR(self->verify);
  return 0;
}

inline void progress_dealloc(Progress* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  progress_clear(self);
  delete std::exchange(self->since_op, nullptr);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyMemberDef progress_members[] = {
    {"count", T_PYSSIZET, offsetof(Progress, count), READONLY, nullptr},
    {"done", T_BOOL, offsetof(Progress, done), READONLY, nullptr},
    {"early_stop", T_BOOL, offsetof(Progress, early_stop), READONLY, nullptr},
    {"frame", T_OBJECT, offsetof(Progress, frame), READONLY, nullptr},
    {"last_missing", T_PYSSIZET, offsetof(Progress, last_missing), READONLY, nullptr},
    {"verify", T_OBJECT, offsetof(Progress, verify), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

// Do what `RecomputeProgress.after_op` does. Freeing a tensor may run Python, and autograd then save more.
inline void note_op(Progress& progress) {
  if (progress.since_op->empty()) return;
  std::vector<Tensor> freed;
  freed.swap(*progress.since_op);
}

inline bool is_done(const Progress& progress) { return progress.done; }

// Do what `RecomputeProgress.stop_before` does, all being filled: whether the run stops before an op that writes to this
// argument. Nothing if Python has to compare tensors that are not plain.
inline std::optional<bool> may_stop(Progress& progress, const IValue* written) {
  StorageImpl* storage = nullptr;
  if (written != nullptr) {
    if (!is_simple(written->toTensor())) return {};
    storage = storage_of(written->toTensor().unsafeGetTensorImpl());
  }
  bool is_shared = false;
  for (const Tensor& tensor : *progress.since_op) {
    if (!is_simple(tensor)) return {};
    is_shared = is_shared || storage_of(tensor.unsafeGetTensorImpl()) == storage;
  }
  note_op(progress);
  return progress.early_stop && !is_shared;
}

inline PyObject* progress_after_op(Progress* self, PyObject*) {
  note_op(*self);
  Py_RETURN_NONE;
}

// What autograd has saved since the last op; with the answer it is forgotten.
inline PyObject* progress_take_recent(Progress* self, PyObject*) {
  HANDLE_TH_ERRORS
  std::vector<Tensor> recent;
  recent.swap(*self->since_op);
  Owned list(checked(PyList_New(0)));
  for (const Tensor& tensor : recent) {
    Owned wrapped(checked(THPVariable_Wrap(tensor)));
    if (PyList_Append(list.get(), wrapped.get()) < 0) return nullptr;
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

// The tensor without its graph; ``is_seen``: by the modes around.
inline PyObject* detached(PyObject* object, const Tensor& tensor, bool is_seen) {
  if (!tensor.requires_grad()) return Py_NewRef(object);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (is_seen || !(type == THPVariableClass || type == ParameterClass))
    return checked(PyObject_CallMethod(object, "detach", nullptr));
  return without_graph(tensor);
}

// Let `RecomputeMode.verify` compare a tensor, where that is not done here.
inline void compare(PyObject* verify, Py_ssize_t index, PyObject* object) {
  if (verify != nullptr && verify != Py_None && !is_as_packed(verify, index, object))
    Owned(checked(PyObject_CallFunction(verify, "nO", index, object)));
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
  THPObjectPtr saved(detached(object, THPVariable_Unpack(object), self->stop_in_pack));
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
    compare(self->verify, index, saved.get());
  }
  if (!self->stop_in_pack) self->since_op->push_back(tensor);
  if (index >= self->last_missing) {
    self->done = 1;
    if (self->stop_in_pack && self->early_stop) return PyObject_CallMethod(python, "stop", nullptr);
  }
  return saved.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
