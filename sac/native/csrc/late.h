// A recomputation inside torch.utils.checkpoint, whose own hooks get what autograd saves one op late; see
// Note [Inside torch.utils.checkpoint] in sac/recompute/torch_checkpoint.py.
#pragma once

#include "fill.h"

namespace sac {

// See `_LatePacking`.
struct LatePacking {
  PyObject_HEAD
  PyObject* theirs;
  PyObject* kept_places;
  PyObject* verify;
  PyObject* waiting;
  Py_ssize_t count;
  char stopped;
};

inline PyObject* late_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *theirs = nullptr, *kept_places = nullptr;
  if (!PyArg_ParseTuple(args, "OO!", &theirs, &PySet_Type, &kept_places)) return nullptr;
  auto* self = reinterpret_cast<LatePacking*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->theirs = Py_NewRef(theirs);
  self->kept_places = Py_NewRef(kept_places);
  self->waiting = PyList_New(0);
  return reinterpret_cast<PyObject*>(self);
}

inline int late_traverse(LatePacking* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->theirs);
  Py_VISIT(self->kept_places);
  Py_VISIT(self->verify);
  Py_VISIT(self->waiting);
  return 0;
}

inline int late_clear(LatePacking* self) {
  Py_CLEAR(self->theirs);
  Py_CLEAR(self->kept_places);
  Py_CLEAR(self->verify);
  Py_CLEAR(self->waiting);
  return 0;
}

inline void late_dealloc(LatePacking* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  late_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* late_done(LatePacking* self, void*) { return PyBool_FromLong(PyList_GET_SIZE(self->waiting) > 0); }

inline PyGetSetDef late_getset[] = {
    {"done", reinterpret_cast<getter>(late_done), nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

inline PyMemberDef late_members[] = {
    {"theirs", T_OBJECT, offsetof(LatePacking, theirs), READONLY, nullptr},
    {"count", T_PYSSIZET, offsetof(LatePacking, count), READONLY, nullptr},
    {"waiting", T_OBJECT, offsetof(LatePacking, waiting), READONLY, nullptr},
    {"stopped", T_BOOL, offsetof(LatePacking, stopped), READONLY, nullptr},
    {"verify", T_OBJECT, offsetof(LatePacking, verify), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

// Do what `_LatePacking.pack` does.
inline PyObject* late_pack(LatePacking* self, PyObject* object) {
  HANDLE_TH_ERRORS
  THPObjectPtr saved(detached(object, THPVariable_Unpack(object), false));
  const Py_ssize_t place = self->count++;
  Owned index(checked(PyLong_FromSsize_t(place)));
  if (!holds(self->kept_places, index.get())) {
    compare(self->verify, place, saved.get());
    if (PyList_Append(self->waiting, saved.get()) < 0) return nullptr;
  }
  return saved.release();
  END_HANDLE_TH_ERRORS
}

// Pass on what waits to torch's hook, which raises when torch has all that it needs; return whether it did not.
inline bool flush(LatePacking* self) {
  Owned late(Py_NewRef(reinterpret_cast<PyObject*>(self)));
  Owned waiting(std::exchange(self->waiting, checked(PyList_New(0))));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(waiting.get()); i++) {
    Owned done(PyObject_CallOneArg(self->theirs, PyList_GET_ITEM(waiting.get(), i)));
    if (done.get() == nullptr) {
      self->stopped = 1;
      return false;
    }
  }
  return true;
}

inline PyObject* late_flush(LatePacking* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (!flush(self)) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyTypeObject* LatePackingType = nullptr;

// Do what `_LatePacking` does between two ops, of which the next one writes to no argument that may wait.
inline bool pass_on(PyObject* progress) {
  if (!PyObject_TypeCheck(progress, LatePackingType)) return false;
  auto* late = reinterpret_cast<LatePacking*>(progress);
  if (PyList_GET_SIZE(late->waiting) > 0 && !flush(late)) throw python_error();
  return true;
}

}  // namespace sac
