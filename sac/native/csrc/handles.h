// What autograd holds in place of the tensors that a region saves, and the two hooks through which it asks for them.
#pragma once

#include "places.h"
#include "record.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

namespace sac {

struct Handle;

// The handles of one region call, by index; nullptr once autograd has dropped it.
struct Handles {
  PyObject_HEAD
  std::vector<Handle*>* list;
  char may_be_read;  // the forward is over, and no recomputation is under way
};

struct Handle {
  PyObject_HEAD
  Handles* all;
  PyObject* value;
  PyObject* watched;
  PyObject* shape;  // of the tensor that autograd saved, if the tensor of a recomputation is compared with it
  PyObject* dtype;
  PyObject* device;
  Py_ssize_t index;
  Py_ssize_t version;
  Py_ssize_t task;
  unsigned long long storage;
  char is_kept;
  char is_external;
};

inline PyTypeObject* HandleType = nullptr;

inline PyObject* handles_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Handles*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->list = new std::vector<Handle*>();
  self->list->reserve(64);
  return reinterpret_cast<PyObject*>(self);
}

inline void handles_dealloc(Handles* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->list;
  type->tp_free(self);
  Py_DECREF(type);
}

inline Py_ssize_t handles_length(Handles* self) { return static_cast<Py_ssize_t>(self->list->size()); }

inline PyObject* handles_get(Handles* self, PyObject* index) {  // None if autograd has dropped it
  const auto number = static_cast<size_t>(PyLong_AsSsize_t(index));
  if (number >= self->list->size() || (*self->list)[number] == nullptr) Py_RETURN_NONE;
  return Py_NewRef(reinterpret_cast<PyObject*>((*self->list)[number]));
}

inline PyObject* handles_alive(Handles* self, PyObject*) {
  PyObject* found = PyList_New(0);
  for (size_t i = 0; found != nullptr && i < self->list->size(); i++)  // a collection of garbage may drop some
    if ((*self->list)[i] != nullptr && PyList_Append(found, reinterpret_cast<PyObject*>((*self->list)[i])) < 0)
      Py_CLEAR(found);
  return found;
}

inline bool waits(const Handle* handle, Py_ssize_t task) {  // see `Handle.waits`
  const bool has_value = handle->value != nullptr && handle->value != Py_None;
  return !has_value && !handle->is_kept && (handle->task != task || task == -1);
}

// See `Handles.split`. A collection of garbage may drop some while Python's objects are made.
inline PyObject* handles_split(Handles* self, PyObject*) {
  HANDLE_TH_ERRORS
  Owned kept(checked(PyList_New(0))), missing(checked(PyList_New(0)));
  for (size_t i = 0; i < self->list->size(); i++) {
    Handle* handle = (*self->list)[i];
    if (handle == nullptr) continue;
    Owned added(handle->is_kept ? Py_NewRef(reinterpret_cast<PyObject*>(handle)) : PyLong_FromSize_t(i));
    if (!added || PyList_Append(handle->is_kept ? kept.get() : missing.get(), added.get()) < 0) return nullptr;
  }
  return PyTuple_Pack(2, kept.get(), missing.get());
  END_HANDLE_TH_ERRORS
}

inline PyObject* handles_waiting(Handles* self, PyObject* task) {  // see `Handles.waiting`
  HANDLE_TH_ERRORS
  const Py_ssize_t number = PyLong_AsSsize_t(task);
  Owned found(checked(PyDict_New()));
  for (size_t i = 0; i < self->list->size(); i++) {
    if ((*self->list)[i] == nullptr || !waits((*self->list)[i], number)) continue;
    Owned handle(Py_NewRef(reinterpret_cast<PyObject*>((*self->list)[i])));
    Owned index(checked(PyLong_FromSize_t(i)));
    if (PyDict_SetItem(found.get(), index.get(), handle.get()) < 0) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* handles_last_waiting(Handles* self, PyObject* task) {
  const Py_ssize_t number = PyLong_AsSsize_t(task);
  for (size_t i = self->list->size(); i-- > 0;)
    if ((*self->list)[i] != nullptr && waits((*self->list)[i], number)) return PyLong_FromSize_t(i);
  return PyLong_FromLong(-1);
}

inline PyMemberDef handles_members[] = {
    {"may_be_read", T_BOOL, offsetof(Handles, may_be_read), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

// Append a new handle.
inline THPObjectPtr add_handle(Handles* all, PyObject* type) {
  auto* handle_type = reinterpret_cast<PyTypeObject*>(type);
  auto* handle = reinterpret_cast<Handle*>(handle_type->tp_alloc(handle_type, 0));
  if (handle == nullptr) throw python_error();
  handle->index = static_cast<Py_ssize_t>(all->list->size());
  handle->task = -2;
  handle->all = reinterpret_cast<Handles*>(Py_NewRef(reinterpret_cast<PyObject*>(all)));
  all->list->push_back(handle);
  return THPObjectPtr(reinterpret_cast<PyObject*>(handle));
}

inline int handle_traverse(Handle* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->value);
  Py_VISIT(self->watched);
  return 0;
}

inline int handle_clear(Handle* self) {
  Py_CLEAR(self->value);
  Py_CLEAR(self->watched);
  return 0;
}

inline void handle_dealloc(Handle* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (self->all != nullptr) (*self->all->list)[self->index] = nullptr;
  handle_clear(self);
  Py_CLEAR(self->shape);
  Py_CLEAR(self->dtype);
  Py_CLEAR(self->device);
  Py_CLEAR(self->all);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyMemberDef handle_members[] = {
    {"index", T_PYSSIZET, offsetof(Handle, index), 0, nullptr},
    {"shape", T_OBJECT, offsetof(Handle, shape), 0, nullptr},
    {"dtype", T_OBJECT, offsetof(Handle, dtype), 0, nullptr},
    {"device", T_OBJECT, offsetof(Handle, device), 0, nullptr},
    {"is_kept", T_BOOL, offsetof(Handle, is_kept), 0, nullptr},
    {"is_external", T_BOOL, offsetof(Handle, is_external), 0, nullptr},
    {"value", T_OBJECT, offsetof(Handle, value), 0, nullptr},
    {"watched", T_OBJECT, offsetof(Handle, watched), 0, nullptr},
    {"version", T_PYSSIZET, offsetof(Handle, version), 0, nullptr},
    {"task", T_PYSSIZET, offsetof(Handle, task), 0, nullptr},
    {"storage", T_ULONGLONG, offsetof(Handle, storage), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

inline bool is_tensor(PyObject* object) { return object != nullptr && THPVariable_Check(object); }

// The tensor that a handle has for backward, or nullptr if Python has to find it; see `Frame._unpack`.
inline PyObject* read_handle(Handle* handle) {
  if (!handle->all->may_be_read || !is_tensor(handle->value)) return nullptr;
  if (handle->is_kept) {
    if (!is_tensor(handle->watched)) return Py_NewRef(handle->value);
    const Tensor& watched = THPVariable_Unpack(handle->watched);
    const Py_ssize_t version = watched.is_inference() ? 0 : watched._version();
    return version == handle->version ? Py_NewRef(handle->value) : nullptr;
  }
  const int task = torch::autograd::get_current_graph_task_id();
  handle->task = task;
  PyObject* value = Py_NewRef(handle->value);
  if (task == -1 || torch::autograd::get_current_graph_task_keep_graph()) Py_CLEAR(handle->value);
  return value;
}

// The tensor without its graph, with its version counter, unseen by any mode.
inline PyObject* without_graph(const Tensor& tensor) {
  torch::torch_dispatch_mode::StashTorchDispatchStackGuard no_modes;
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return THPVariable_Wrap(Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false)));
}

// The hooks of one region call. Its dictionaries are those of the recorder and its tape; see `ReplayRecorder.pack`.
struct Hooks {
  PyObject_HEAD
  Tape* tape;
  Handles* handles;
  PyObject* handle_type;
  PyObject* frame;
  PyObject* recorder;
  Places* places;        // of missing handles
  PyObject* kept_in;     // root -> kept values that no op has written to since
  PyObject* writers;     // root -> entries that write to it
  PyObject* persistent;  // roots of inputs and parameters
  Checksums* checksums;  // of missing handles; nullptr if nothing is compared
  char in_order;         // values may come back with other strides
  char keeps_persistent;  // whether handles keep parameters that Python's set does not know of
};

inline PyObject* hooks_new(PyTypeObject* type, PyObject* args, PyObject*) {
  auto* self = reinterpret_cast<Hooks*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  int in_order = 0, keeps_persistent = 0;
  PyObject* checksums = nullptr;
  if (!PyArg_ParseTuple(args, "OOOOOO!OOOOpp", &self->tape, &self->handles, &self->handle_type, &self->frame, &self->recorder,
                        PlacesType, &self->places, &self->kept_in, &self->writers, &self->persistent, &checksums,
                        &in_order, &keeps_persistent)) {
    self->tape = nullptr;
    self->handles = nullptr;
    self->places = nullptr;
    self->handle_type = self->frame = self->recorder = self->kept_in = self->writers = self->persistent = nullptr;
    Py_DECREF(self);
    return nullptr;
  }
  if (Py_TYPE(checksums) == ChecksumsType) self->checksums = reinterpret_cast<Checksums*>(Py_NewRef(checksums));
  for (PyObject* one : {reinterpret_cast<PyObject*>(self->tape), reinterpret_cast<PyObject*>(self->handles),
                        self->handle_type, self->frame, self->recorder, reinterpret_cast<PyObject*>(self->places),
                        self->kept_in, self->writers, self->persistent})
    Py_INCREF(one);
  self->in_order = static_cast<char>(in_order);
  self->keeps_persistent = static_cast<char>(keeps_persistent);
  return reinterpret_cast<PyObject*>(self);
}

inline int hooks_traverse(Hooks* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (PyObject* one : {reinterpret_cast<PyObject*>(self->tape), self->handle_type, self->frame, self->recorder,
                        self->kept_in, self->writers, self->persistent})
    Py_VISIT(one);
  return 0;
}

inline int hooks_clear(Hooks* self) {
  Py_CLEAR(self->tape);
  Py_CLEAR(self->handles);
  Py_CLEAR(self->handle_type);
  Py_CLEAR(self->frame);
  Py_CLEAR(self->recorder);
  Py_CLEAR(self->places);
  Py_CLEAR(self->kept_in);
  Py_CLEAR(self->writers);
  Py_CLEAR(self->persistent);
  Py_CLEAR(self->checksums);
  return 0;
}

inline void hooks_dealloc(Hooks* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  hooks_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Whether autograd saves what a factory has made, no op has written to, and Python has to look at.
inline bool has_to_be_explained(Tape& tape, int root, const Tensor& tensor) {
  const Factory* factory = factory_at(*tape.tables, root);
  if (factory == nullptr) return false;
  if (tape.mode == nullptr || c10::impl::TorchDispatchModeTLS::stack_len() != tape.depth || has(tape.kept, root))
    return true;
  const Factory made = *factory;
  pybind11::gil_scoped_release no_gil;
  torch::torch_dispatch_mode::StashTorchDispatchStackGuard no_modes;
  return !explain(tape, made, tensor);
}

// Do what `ReplayRecorder.pack` does for a tensor on the tape; 0 if Python has to do it.
inline int pack_known(Hooks* self, Handle* handle, PyObject* object, const Tensor& tensor) {
  Tables& t = *self->tape->tables;
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (self->tape->needs_attention || impl->key_set().has(c10::DispatchKey::Python)) return 0;
  const auto found = t.ids.find(impl);
  if (found == t.ids.end() && reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass && storage_of(impl)) {
    sync(*self->tape);  // a parameter that the op at hand will read
    if (t.roots.find(storage_of(impl)) != t.roots.end()) return 0;
    handle->is_kept = handle->is_external = 1;
    handle->version = tensor._version();
    handle->storage = reinterpret_cast<unsigned long long>(storage_of(impl));
    Py_XSETREF(handle->watched, Py_NewRef(object));
    Py_XSETREF(handle->value, Py_NewRef(object));
    return 1;
  }
  if (found == t.ids.end() || !impl->version_counter().enabled()) return 0;
  const int value = found->second, root = t.values[value].root;
  const uint32_t version = impl->version_counter().current_version();
  if (has_moved(t.values[value], impl)) return 0;
  if (version != t.values[value].version) {  // the region's own writes may explain it
    if (self->tape->seen_at == nullptr || !accept_version(*self->tape, value, version)) return 0;
  }
  if (!t.factories.empty() && has_to_be_explained(*self->tape, root, tensor)) return 0;
  Owned key(checked(PyLong_FromLong(root)));
  const bool is_kept = PyDict_GET_SIZE(self->kept_in) > 0 && has(self->kept_in, key.get());
  const bool is_written = PyDict_GET_SIZE(self->writers) > 0 && has(self->writers, key.get());
  bool is_persistent = PySet_GET_SIZE(self->persistent) > 0 && has(self->persistent, key.get());
  if (!is_persistent && self->keeps_persistent)
    for (const ParameterLeaf& leaf : t.parameters)
      if (!leaf.is_told && t.values[leaf.value].root == root) is_persistent = true;
  if (!is_kept && is_written) {  // a parameter that the region has written to is kept
    if (self->tape->leaves == nullptr || has(self->tape->leaves, root) || parameter_of(t, root) != nullptr) return 0;
    is_persistent = false;
  }
  if (is_kept) {
    PyObject* kept = tensor.is_leaf() ? Py_NewRef(object) : without_graph(tensor);
    handle->is_kept = 1;
    handle->version = version;
    handle->storage = reinterpret_cast<unsigned long long>(storage_of(impl));
    Py_XSETREF(handle->watched, Py_NewRef(kept));
    Py_XSETREF(handle->value, kept);
    t.recent.push_back(Recent{static_cast<int>(handle->index), tensor, root});
    return 1;
  }
  if (is_persistent) {
    handle->is_kept = handle->is_external = 1;
    handle->version = version;
    Py_XSETREF(handle->watched, Py_NewRef(object));
    Py_XSETREF(handle->value, Py_NewRef(object));
    return 1;
  }
  const auto index = static_cast<size_t>(handle->index);
  at_handle(*self->places->list, index, SavedAt()) = SavedAt{value, static_cast<Py_ssize_t>(t.entries.size()), version};
  t.recent.push_back(Recent{static_cast<int>(handle->index), tensor, root});
  if (self->checksums == nullptr) return 1;
  const int64_t sum = checksum_of(tensor, self->in_order != 0);
  if (sum >= 0)
    at_handle(*self->checksums->sums, index, NO_SUM) = sum;
  else
    check(PyObject_CallMethod(self->recorder, "sum_up", "nO", handle->index, object));
  return 1;
}

// Whether this thread was forked inside the region, which will raise: it may not look into a tape that the region's own
// thread writes to without the GIL.
inline bool is_forked(const Hooks& hooks) {
  const Tape& tape = *hooks.tape;
  return !hooks.handles->may_be_read && tape.thread != 0 && tape.thread != PyThread_get_thread_ident() &&
         torch::autograd::get_current_graph_task_id() == -1;
}

inline PyObject* hooks_pack(Hooks* self, PyObject* object) {
  HANDLE_TH_ERRORS
  const Tensor tensor = tensor_from(object);
  THPObjectPtr made = add_handle(self->handles, self->handle_type);
  auto* handle = reinterpret_cast<Handle*>(made.get());
  if (is_forked(*self)) {
    handle->is_kept = 1;
    handle->value = Py_NewRef(object);
    return made.release();
  }
  int done = pack_known(self, handle, object, tensor);
  if (done == 0) {
    PyObject* answer = PyObject_CallMethod(self->recorder, "pack", "OO", object, handle);
    done = answer != nullptr ? 1 : -1;
    Py_XDECREF(answer);
  }
  return done < 0 ? nullptr : made.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* hooks_unpack(Hooks* self, PyObject* object) {
  HANDLE_TH_ERRORS
  PyObject* value = read_handle(reinterpret_cast<Handle*>(object));
  return value != nullptr ? value : PyObject_CallMethod(self->frame, "_unpack", "O", object);
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
