// The usual call of a module inside of a region; see Note [Calls of modules in C++] in sac/recompute/module_tracker.py.
#pragma once

#include "record.h"
#include "walk.h"

namespace sac {

// What this thread has told `listen`.
struct Listening {
  bool is_known = false;  // if not, calls go to Python, which has other listeners or has not told any
  Mode* mode = nullptr;   // owned; nullptr if none listens
};

inline thread_local Listening listening;

inline PyTypeObject* ModeType = nullptr;
inline vectorcallfunc call_in_python = nullptr;  // of `TrackedForward.__call__`

// Tells a mode in which module it is, for one scope.
class Inside {
 public:
  Inside(Mode* mode, PyObject* path, PyObject* sites) : mode_(mode), path_(mode->path), sites_(mode->sites) {
    Py_INCREF(mode);
    mode->path = Py_NewRef(path);
    mode->sites = Py_NewRef(sites);
  }
  ~Inside() {
    Py_XSETREF(mode_->path, path_);
    Py_XSETREF(mode_->sites, sites_);
    Py_DECREF(mode_);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Mode* mode_;
  PyObject *path_, *sites_;
};

// Whether something else than the interpreter runs frames, as Dynamo does: it sees the same ones as without the library.
inline bool has_other_evaluator() {
  return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != _PyEval_EvalFrameDefault;
}

// Do what `TrackedForward.__call__` does; these are its arguments.
inline PyObject* call_tracked(PyObject* function, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  static PyObject* const module_name = PyUnicode_InternFromString("module");
  static PyObject* const path_name = PyUnicode_InternFromString("path");
  static PyObject* const before_name = PyUnicode_InternFromString("before");
  static PyObject* const forward_name = PyUnicode_InternFromString("forward");
  constexpr size_t MOST = 16;
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(nargsf));
  const size_t all = count + (keywords != nullptr ? static_cast<size_t>(PyTuple_GET_SIZE(keywords)) : 0);
  if (!listening.is_known || count == 0 || all > MOST || has_other_evaluator())
    return call_in_python(function, args, nargsf, keywords);
  Owned before(PyObject_GetAttr(args[0], before_name));
  if (!before) return nullptr;
  if (before.get() != Py_None) return call_in_python(function, args, nargsf, keywords);
  Owned module(PyObject_GetAttr(args[0], module_name));
  if (!module) return nullptr;
  PyObject* found = _PyType_Lookup(Py_TYPE(module.get()), forward_name);
  if (found == nullptr || !PyFunction_Check(found))  // a static method, say
    return call_in_python(function, args, nargsf, keywords);
  Owned forward(Py_NewRef(found));
  PyObject* given[MOST] = {module.get()};
  std::copy(args + 1, args + all, given + 1);
  Mode* mode = listening.mode;
  if (mode == nullptr) return PyObject_Vectorcall(forward.get(), given, count, keywords);
  Owned path(PyObject_GetAttr(args[0], path_name));
  if (!path) return nullptr;
  PyObject* sites = PyDict_GetItemWithError(mode->sites_at, path.get());
  if (sites == nullptr)  // the first call of this module, or an error
    return PyErr_Occurred() != nullptr ? nullptr : call_in_python(function, args, nargsf, keywords);
  Inside inside(mode, path.get(), sites);
  return PyObject_Vectorcall(forward.get(), given, count, keywords);
}

// Let the library run the usual calls of a function: `TrackedForward.__call__`. Whoever looks at it sees no difference.
inline void take_over(PyFunctionObject* function) {
  if (function->vectorcall == call_tracked) return;
  call_in_python = function->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(function, call_tracked);
#else
  function->vectorcall = call_tracked;
#endif
}

// Whether the library can tell a mode where it is; -1 after an error.
inline int can_tell(PyObject* object) {
  static PyObject* const table_name = PyUnicode_InternFromString("table");
  static PyObject* const sites_name = PyUnicode_InternFromString("sites_at");
  if (!PyObject_TypeCheck(object, ModeType)) return 0;
  auto* mode = reinterpret_cast<Mode*>(object);
  if (mode->sites_at == nullptr) {
    Owned table(PyObject_GetAttr(object, table_name));
    mode->sites_at = table ? PyObject_GetAttr(table.get(), sites_name) : nullptr;
    if (mode->sites_at == nullptr) return -1;
  }
  return PyDict_CheckExact(mode->sites_at) && mode->path != nullptr && mode->sites != nullptr ? 1 : 0;
}

// The listeners of this thread change. Arguments: `TrackedForward.__call__`, a mode or None, a `ModulePass` or None.
inline PyObject* listen(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (!has_count(nargs, 3)) return nullptr;
  if (!PyFunction_Check(args[0])) Py_RETURN_NONE;  // somebody has wrapped it
  take_over(reinterpret_cast<PyFunctionObject*>(args[0]));
  const bool has_mode = args[1] != Py_None, has_modules = args[2] != Py_None;
  const int tells = has_mode && !has_modules ? can_tell(args[1]) : 0;
  if (tells < 0) return nullptr;
  listening.is_known = tells == 1 || !(has_mode || has_modules);
  Mode* mode = tells == 1 ? reinterpret_cast<Mode*>(args[1]) : nullptr;
  Py_XINCREF(mode);
  Py_XSETREF(listening.mode, mode);
  Py_RETURN_NONE;
}

}  // namespace sac
