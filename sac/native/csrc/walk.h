// Walks over the modules of a region and their tables: the loops of tables.py, fingerprint.py and python_state.py in
// sac/region, which are the reference.
//
// A function returns None, and has changed nothing, if it meets what it does not know, such as a table that is no plain
// dict; Python then does the walk. While a dict is walked no Python runs, not even the garbage collector: entries are
// first collected, each with a reference of its own. Nothing is kept between two calls.
#pragma once

#include <algorithm>
#include <unordered_set>
#include <vector>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/object_ptr.h>

namespace sac {

struct Named {
  Owned name, value;
};

// None, after an error that Python is to meet again; an interrupt is passed on.
inline PyObject* left_to_python() {
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

inline bool has_count(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
  return given == wanted;
}

// The dict of a table that is a plain dict or a class; null for all others.
inline Owned dict_of_table(PyObject* table) {
  if (PyDict_CheckExact(table)) return Owned(Py_NewRef(table));
  if (!PyType_Check(table)) return Owned();
#if PY_VERSION_HEX >= 0x030C0000
  Owned dict(PyType_GetDict(reinterpret_cast<PyTypeObject*>(table)));
#else
  Owned dict(Py_XNewRef(reinterpret_cast<PyTypeObject*>(table)->tp_dict));
#endif
  return dict && PyDict_CheckExact(dict.get()) ? std::move(dict) : Owned();
}

// The entries of a dict from position `first` on; appends to `found`.
inline void collect(PyObject* dict, Py_ssize_t first, std::vector<Named>& found) {
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0, place = 0; PyDict_Next(dict, &at, &name, &value); ++place)
    if (place >= first) found.push_back(Named{Owned(Py_NewRef(name)), Owned(Py_NewRef(value))});
}

// Whether a class is hashed and compared by identity, which runs no Python.
inline bool is_usual_class(PyTypeObject* type) {
  const PyTypeObject* meta = Py_TYPE(type);
  return meta == &PyType_Type ||
         (meta->tp_hash == PyType_Type.tp_hash && meta->tp_richcompare == PyType_Type.tp_richcompare);
}

// `TablesHolder`: tables, first. Returns the lengths of the tables, how many entries of each count, and the names and
// values of these.
inline PyObject* flat_entries(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 2)) return nullptr;
  const Py_ssize_t first = PyLong_AsSsize_t(args[1]), count = PyList_Size(args[0]);
  if (PyErr_Occurred()) return nullptr;
  std::vector<Named> found;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> sizes;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Owned dict = dict_of_table(PyList_GET_ITEM(args[0], i));
    if (!dict) return left_to_python();
    const auto begin = static_cast<Py_ssize_t>(found.size());
    collect(dict.get(), first, found);
    if (first != 0) std::reverse(found.begin() + begin, found.end());
    sizes.emplace_back(PyDict_Size(dict.get()), static_cast<Py_ssize_t>(found.size()) - begin);
  }
  const auto all = static_cast<Py_ssize_t>(found.size());
  Owned lengths(PyList_New(count)), counts(PyList_New(count)), names(PyList_New(all)), values(PyList_New(all));
  if (!lengths || !counts || !names || !values) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyList_SET_ITEM(lengths.get(), i, PyLong_FromSsize_t(sizes[i].first));
    PyList_SET_ITEM(counts.get(), i, PyLong_FromSsize_t(sizes[i].second));
  }
  for (Py_ssize_t i = 0; i < all; ++i) {
    PyList_SET_ITEM(names.get(), i, found[i].name.release());
    PyList_SET_ITEM(values.get(), i, found[i].value.release());
  }
  return PyTuple_Pack(4, lengths.get(), counts.get(), names.get(), values.get());
  END_HANDLE_TH_ERRORS
}

// `TablesHolder.now`: tables, first, lengths, names, values. Returns whether the tables hold these very objects. If not,
// they may still be the same: Python compares the names.
inline PyObject* holds_entries(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 5)) return nullptr;
  const Py_ssize_t first = PyLong_AsSsize_t(args[1]), count = PyList_Size(args[0]);
  const Py_ssize_t all = PyList_Size(args[3]);
  if (PyErr_Occurred() || PyList_Size(args[2]) != count || PyList_Size(args[4]) != all) Py_RETURN_FALSE;
  Py_ssize_t begin = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Owned dict = dict_of_table(PyList_GET_ITEM(args[0], i));
    const Py_ssize_t length = PyLong_AsSsize_t(PyList_GET_ITEM(args[2], i));
    if (!dict || PyDict_Size(dict.get()) != length) Py_RETURN_FALSE;
    const Py_ssize_t end = begin + std::max<Py_ssize_t>(length - first, 0);
    if (end > all) Py_RETURN_FALSE;
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0, place = 0; PyDict_Next(dict.get(), &at, &name, &value); ++place) {
      if (place < first) continue;
      const Py_ssize_t index = first != 0 ? end - 1 - (place - first) : begin + place;
      if (PyList_GET_ITEM(args[3], index) != name || PyList_GET_ITEM(args[4], index) != value) Py_RETURN_FALSE;
    }
    begin = end;
  }
  return PyBool_FromLong(begin == all);
  END_HANDLE_TH_ERRORS
}

// `AttributesHolder.are_usual`: tables, name. Returns whether the first name in each table is this very string.
inline PyObject* all_begin_with(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 2)) return nullptr;
  const Py_ssize_t count = PyList_Size(args[0]);
  if (count < 0) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *table = PyList_GET_ITEM(args[0], i), *name = nullptr;
    Py_ssize_t at = 0;
    if (!PyDict_CheckExact(table) || !PyDict_Next(table, &at, &name, nullptr) || name != args[1]) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// `_HooksHolder.now`: tables, names. Returns whether a table has a value under one of the names that is true.
inline PyObject* any_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 2)) return nullptr;
  const Py_ssize_t count = PyList_Size(args[0]), names = PyTuple_Size(args[1]);
  if (PyErr_Occurred()) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Owned table(Py_XNewRef(PyList_GetItem(args[0], i)));
    if (!table || !PyDict_CheckExact(table.get())) return left_to_python();
    for (Py_ssize_t k = 0; k < names; ++k) {
      Owned value(Py_XNewRef(PyDict_GetItemWithError(table.get(), PyTuple_GET_ITEM(args[1], k))));
      if (!value && PyErr_Occurred()) return left_to_python();
      const int is_true = value ? PyObject_IsTrue(value.get()) : 0;
      if (is_true < 0) return left_to_python();
      if (is_true != 0) Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// -- The modules of a fingerprint

struct Words {  // interned, for the whole process
  PyObject* dict = PyUnicode_InternFromString("__dict__");
  PyObject* training = PyUnicode_InternFromString("training");
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* hooks = PyUnicode_InternFromString("_forward_hooks");
  PyObject* pre_hooks = PyUnicode_InternFromString("_forward_pre_hooks");
  PyObject* name = PyUnicode_InternFromString("__name__");
  PyObject* freevars = PyUnicode_InternFromString("co_freevars");
  PyObject* names = PyUnicode_InternFromString("co_names");
};

inline const Words& words() {
  static const Words found;
  return found;
}

struct FoundModule {
  Owned module, held, training, hooks, pre_hooks;
  Py_ssize_t count, children;
  bool is_skipped;
};

inline Owned entry_of(PyObject* dict, PyObject* name) { return Owned(Py_XNewRef(PyDict_GetItemWithError(dict, name))); }

// Look at one module and append its children to `waiting`; false if Python has to.
inline bool look_at_module(FoundModule& found, PyObject* built_in, std::vector<Owned>& waiting) {
  const Words& w = words();
  PyTypeObject* type = Py_TYPE(found.module.get());
  found.held = Owned(PyObject_GetAttr(found.module.get(), w.dict));
  if (!found.held || !PyDict_CheckExact(found.held.get()) || !is_usual_class(type)) return false;
  PyObject* held = found.held.get();
  found.training = entry_of(held, w.training);
  Owned children = entry_of(held, w.modules), hooks = entry_of(held, w.hooks),
              pre_hooks = entry_of(held, w.pre_hooks);
  if (!found.training || !children || !hooks || !pre_hooks || !PyDict_CheckExact(children.get())) return false;
  found.count = PyDict_Size(held);
  found.children = PyDict_Size(children.get());
  PyObject* usual = PyDict_GetItemWithError(built_in, reinterpret_cast<PyObject*>(type));
  if (usual == nullptr && PyErr_Occurred()) return false;
  found.is_skipped = found.children == 0 && usual != nullptr && PyLong_AsSsize_t(usual) == found.count;
  PyObject* child = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(children.get(), &at, nullptr, &child);)
    if (child != Py_None) waiting.emplace_back(Py_NewRef(child));
  const int has_hooks = PyObject_IsTrue(hooks.get());
  const int has_any = has_hooks != 0 ? has_hooks : PyObject_IsTrue(pre_hooks.get());
  if (has_any < 0) return false;
  if (has_any != 0) {
    Owned mine(PyObject_GetAttr(found.module.get(), w.hooks));
    Owned mine_before(mine ? PyObject_GetAttr(found.module.get(), w.pre_hooks) : nullptr);
    if (!mine_before) return false;
    found.hooks = Owned(PySequence_Tuple(mine.get()));
    found.pre_hooks = Owned(found.hooks ? PySequence_Tuple(mine_before.get()) : nullptr);
    if (!found.pre_hooks) return false;
  }
  return true;
}

// `FunctionFingerprint._add_module`: root, seen, `_BUILT_IN`, `weak_identity`. Returns the parts, the modules, their
// dicts and which modules are built in, and adds the modules to `seen`.
inline PyObject* modules_below(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 4)) return nullptr;
  PyObject *seen = args[1], *built_in = args[2], *identity_of = args[3];
  std::vector<FoundModule> all;
  std::vector<Owned> waiting, classes, identities;
  std::unordered_set<PyObject*> met;
  waiting.emplace_back(Py_NewRef(args[0]));
  for (size_t i = 0; i < waiting.size(); ++i) {
    FoundModule found{};
    found.module = Owned(Py_NewRef(waiting[i].get()));
    if (!met.insert(found.module.get()).second) continue;
    if (PyDict_Size(seen) != 0) {
      Owned address(PyLong_FromVoidPtr(found.module.get()));
      const int is_seen = address ? PyDict_Contains(seen, address.get()) : -1;
      if (is_seen < 0) return left_to_python();
      if (is_seen != 0) continue;
    }
    if (!look_at_module(found, built_in, waiting)) return left_to_python();
    all.push_back(std::move(found));
  }
  const auto count = static_cast<Py_ssize_t>(all.size());
  Owned parts(PyList_New(0)), owners(PyList_New(count)), helds(PyList_New(count)), skipped(PyList_New(count));
  if (!parts || !owners || !helds || !skipped) return nullptr;
  const auto add = [&parts](Owned part) { return part && PyList_Append(parts.get(), part.get()) == 0; };
  for (Py_ssize_t i = 0; i < count; ++i) {
    FoundModule& found = all[i];
    auto* cls = reinterpret_cast<PyObject*>(Py_TYPE(found.module.get()));
    size_t which = 0;
    while (which < classes.size() && classes[which].get() != cls) ++which;
    if (which == classes.size()) {
      Owned identity(PyObject_CallOneArg(identity_of, cls));
      if (!identity) return left_to_python();
      classes.emplace_back(Py_NewRef(cls));
      identities.push_back(std::move(identity));
    }
    bool is_done = add(Owned(Py_NewRef(identities[which].get()))) && add(std::move(found.training));
    if (!found.is_skipped)
      is_done = is_done && add(Owned(PyLong_FromSsize_t(found.count))) && add(Owned(PyLong_FromSsize_t(found.children)));
    if (found.hooks) is_done = is_done && add(std::move(found.hooks)) && add(std::move(found.pre_hooks));
    if (!is_done) return left_to_python();
    PyList_SET_ITEM(owners.get(), i, found.module.release());
    PyList_SET_ITEM(helds.get(), i, found.held.release());
    PyList_SET_ITEM(skipped.get(), i, PyBool_FromLong(found.is_skipped));
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    Owned address(PyLong_FromVoidPtr(PyList_GET_ITEM(owners.get(), i)));
    Owned number(PyLong_FromSsize_t(PyDict_Size(seen)));
    if (!address || !number || PyDict_SetItem(seen, address.get(), number.get()) < 0) return nullptr;
  }
  return PyTuple_Pack(4, parts.get(), owners.get(), helds.get(), skipped.get());
  END_HANDLE_TH_ERRORS
}

// `FunctionFingerprint._add_module`: names, values and counts as in the record of the attributes, from the last module
// to the first; which modules are built in, from the first to the last; `PLAIN`, parts, objects, `_add_object`. Adds the
// plain values to the parts, and calls `_add_object` for all others.
inline PyObject* add_values(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 8)) return nullptr;
  PyObject *names = args[0], *values = args[1], *counts = args[2], *skipped = args[3], *plain = args[4];
  PyObject *parts = args[5], *objects = args[6], *add_object = args[7];
  const Py_ssize_t modules = PyList_Size(counts);
  Py_ssize_t at = PyList_Size(values);
  if (PyErr_Occurred()) return nullptr;
  for (Py_ssize_t i = 0; i < modules; ++i) {
    const bool is_skipped = PyList_GetItem(skipped, i) == Py_True;
    const Py_ssize_t end = at - PyLong_AsSsize_t(PyList_GetItem(counts, modules - 1 - i));
    if (PyErr_Occurred()) return nullptr;
    while (at > end) {
      --at;
      Owned name(Py_XNewRef(PyList_GetItem(names, at))), value(Py_XNewRef(PyList_GetItem(values, at)));
      if (!name || !value) return nullptr;
      const int is_plain = PySet_Contains(plain, reinterpret_cast<PyObject*>(Py_TYPE(value.get())));
      if (is_plain < 0) return nullptr;
      if (is_skipped) {
        if (is_plain == 0 && PyList_Append(objects, value.get()) < 0) return nullptr;
      } else if (is_plain != 0) {
        if (PyList_Append(parts, value.get()) < 0) return nullptr;
      } else {
        Owned done(PyObject_CallFunctionObjArgs(add_object, name.get(), value.get(), objects, nullptr));
        if (!done) return nullptr;
      }
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// -- The attributes of classes

// `_may_hold`: -1 if Python has to look.
inline int may_hold(PyObject* function, PyObject* plain) {
  const Words& w = words();
  PyObject *code = PyFunction_GetCode(function), *closure = PyFunction_GetClosure(function);
  if (closure != nullptr && closure != Py_None) {
    Owned free(PyObject_GetAttr(code, w.freevars));
    if (!free) return -1;
    PyObject* only = PyTuple_Size(free.get()) == 1 ? PyTuple_GET_ITEM(free.get(), 0) : nullptr;
    if (only == nullptr || PyUnicode_CompareWithASCIIString(only, "__class__") != 0) return 1;
  }
  const auto is_plain = [plain](PyObject* value) {
    return is_usual_class(Py_TYPE(value)) ? PySet_Contains(plain, reinterpret_cast<PyObject*>(Py_TYPE(value))) : -1;
  };
  PyObject *defaults = PyFunction_GetDefaults(function), *named = PyFunction_GetKwDefaults(function);
  if (defaults != nullptr && defaults != Py_None) {
    if (!PyTuple_CheckExact(defaults)) return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(defaults); ++i)
      if (const int found = is_plain(PyTuple_GET_ITEM(defaults, i)); found != 1) return found == 0 ? 1 : -1;
  }
  if (named != nullptr && named != Py_None) {
    if (!PyDict_CheckExact(named)) return -1;
    PyObject* value = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(named, &i, nullptr, &value);)
      if (const int found = is_plain(value); found != 1) return found == 0 ? 1 : -1;
  }
  PyObject* held = reinterpret_cast<PyFunctionObject*>(function)->func_dict;
  if (held != nullptr) {
    if (!PyDict_CheckExact(held)) return -1;
    if (PyDict_Size(held) != 0) return 1;
  }
  Owned name(PyObject_GetAttr(function, w.name)), names(PyObject_GetAttr(code, w.names));
  return name && names && PyUnicode_CheckExact(name.get()) ? PySequence_Contains(names.get(), name.get()) : -1;
}

// `_note_classes`: class, whether with methods, `PLAIN`. Returns the attributes that may hold state.
inline PyObject* values_in_class(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 3)) return nullptr;
  Owned dict = PyType_Check(args[0]) ? dict_of_table(args[0]) : Owned();
  if (!dict) return left_to_python();
  const bool with_methods = args[1] == Py_True;
  std::vector<Named> all;
  collect(dict.get(), 0, all);
  Owned found(PyList_New(0));
  if (!found) return nullptr;
  for (auto& [name, value] : all) {
    PyTypeObject* type = Py_TYPE(value.get());
    if (!PyUnicode_CheckExact(name.get()) || !is_usual_class(type)) return left_to_python();
    int is_needed = PySet_Contains(args[2], reinterpret_cast<PyObject*>(type));
    if (is_needed >= 0) is_needed = is_needed == 0;
    if (is_needed == 1 && type == &PyFunction_Type) is_needed = with_methods ? may_hold(value.get(), args[2]) : 0;
    if (is_needed < 0) return left_to_python();
    const bool is_special = PyUnicode_GetLength(name.get()) >= 2 && PyUnicode_ReadChar(name.get(), 0) == '_' &&
                            PyUnicode_ReadChar(name.get(), 1) == '_';
    if (is_needed == 1 && !is_special && PyList_Append(found.get(), value.get()) < 0) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
