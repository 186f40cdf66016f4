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

// The entries of many tables, as `TablesHolder` records them.
struct FoundTables {
  explicit FoundTables(Py_ssize_t first) : first(first) {}

  void add(PyObject* table) {  // a plain dict
    const auto begin = static_cast<Py_ssize_t>(entries.size());
    collect(table, first, entries);
    if (first != 0) std::reverse(entries.begin() + begin, entries.end());
    close(table, begin);
  }

  void close(PyObject* table, Py_ssize_t begin) {  // its entries are those from `begin` on
    sizes.emplace_back(PyDict_Size(table), static_cast<Py_ssize_t>(entries.size()) - begin);
    tables.emplace_back(Py_NewRef(table));
  }

  void reverse() {  // from the last table to the first, and their entries too
    std::reverse(tables.begin(), tables.end());
    std::reverse(entries.begin(), entries.end());
    std::reverse(sizes.begin(), sizes.end());
  }

  // Its tables, their lengths, how many entries of each count, and the names and values of these; null after an error.
  PyObject* given() {
    const auto count = static_cast<Py_ssize_t>(sizes.size()), all = static_cast<Py_ssize_t>(entries.size());
    Owned list(PyList_New(count)), lengths(PyList_New(count)), counts(PyList_New(count)), names(PyList_New(all)),
        values(PyList_New(all));
    if (!list || !lengths || !counts || !names || !values) return nullptr;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyList_SET_ITEM(list.get(), i, tables[i].release());
      PyList_SET_ITEM(lengths.get(), i, PyLong_FromSsize_t(sizes[i].first));
      PyList_SET_ITEM(counts.get(), i, PyLong_FromSsize_t(sizes[i].second));
    }
    for (Py_ssize_t i = 0; i < all; ++i) {
      PyList_SET_ITEM(names.get(), i, entries[i].name.release());
      PyList_SET_ITEM(values.get(), i, entries[i].value.release());
    }
    return PyTuple_Pack(5, list.get(), lengths.get(), counts.get(), names.get(), values.get());
  }

  Py_ssize_t first;
  std::vector<Owned> tables;
  std::vector<Named> entries;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> sizes;
};

// `TablesHolder`: tables, first. Returns the lengths of the tables, how many entries of each count, and the names and
// values of these.
inline PyObject* flat_entries(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 2)) return nullptr;
  const Py_ssize_t first = PyLong_AsSsize_t(args[1]), count = PyList_Size(args[0]);
  if (PyErr_Occurred()) return nullptr;
  FoundTables found(first);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Owned dict = dict_of_table(PyList_GET_ITEM(args[0], i));
    if (!dict) return left_to_python();
    found.add(dict.get());
  }
  Owned given(found.given());
  return given ? PySequence_GetSlice(given.get(), 1, 5) : nullptr;
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
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* buffers = PyUnicode_InternFromString("_buffers");
  PyObject* access = PyUnicode_InternFromString("__getattribute__");
  PyObject* forward = PyUnicode_InternFromString("forward");
  PyObject* before = PyUnicode_InternFromString("before");
  PyObject* module = PyUnicode_InternFromString("__module__");
  PyObject* ours = PyUnicode_InternFromString("sac.");
  PyObject* name = PyUnicode_InternFromString("__name__");
  PyObject* freevars = PyUnicode_InternFromString("co_freevars");
  PyObject* names = PyUnicode_InternFromString("co_names");
  PyObject* found = PyUnicode_InternFromString("_found");
};

inline const Words& words() {
  static const Words found;
  return found;
}

struct FoundModule {
  Owned module, held;
  Owned training, parameters, buffers, children, hooks, pre_hooks;  // entries of `held`
  Py_ssize_t count;
  bool is_skipped, has_hooks;
};

// The entries of nn.Module itself that are looked at, each with its place in the dict.
struct Standard {
  explicit Standard(PyObject* names) {  // a tuple
    const Words& w = words();
    const std::pair<PyObject*, Owned FoundModule::*> wanted[] = {
        {w.training, &FoundModule::training}, {w.parameters, &FoundModule::parameters},
        {w.buffers, &FoundModule::buffers},   {w.modules, &FoundModule::children},
        {w.hooks, &FoundModule::hooks},       {w.pre_hooks, &FoundModule::pre_hooks}};
    for (Py_ssize_t place = 0; place < PyTuple_Size(names); ++place) {
      Owned FoundModule::*field = nullptr;
      for (const auto& [name, member] : wanted)
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, place), name) == 0) field = member;
      entries.emplace_back(PyTuple_GET_ITEM(names, place), field);
    }
  }
  std::vector<std::pair<PyObject*, Owned FoundModule::*>> entries;  // names, and where the value goes
};

// Whether the modules of a class give what their dicts hold, as those of nn.Module do.
inline bool has_usual_access(PyTypeObject* type, const Standard& standard) {
  PyObject* access = words().access;
  if (!is_usual_class(type) || _PyType_Lookup(type, access) != _PyType_Lookup(&PyBaseObject_Type, access)) return false;
  for (const auto& [name, field] : standard.entries)
    if (field != nullptr && _PyType_Lookup(type, name) != nullptr) return false;
  return true;
}

// Look at one module: append its children to `waiting`, and its own attributes; false if Python has to.
inline bool look_at_module(FoundModule& found, const Standard& standard, PyObject* built_in,
                           std::vector<Owned>& waiting, FoundTables& attributes) {
  found.held = Owned(PyObject_GetAttr(found.module.get(), words().dict));
  if (!found.held || !PyDict_CheckExact(found.held.get())) return false;
  PyObject *held = found.held.get(), *name = nullptr, *value = nullptr;
  Py_ssize_t at = 0;
  for (const auto& [usual, field] : standard.entries) {
    if (!PyDict_Next(held, &at, &name, &value)) return false;
    if (name != usual && (!PyUnicode_CheckExact(name) || PyUnicode_Compare(name, usual) != 0)) return false;
    if (field != nullptr) found.*field = Owned(Py_NewRef(value));
  }
  const auto count = static_cast<Py_ssize_t>(attributes.entries.size());
  while (PyDict_Next(held, &at, &name, &value))
    attributes.entries.push_back(Named{Owned(Py_NewRef(name)), Owned(Py_NewRef(value))});
  attributes.close(held, count);
  PyObject* children = found.children.get();
  if (!PyDict_CheckExact(children)) return false;
  found.count = PyDict_Size(held);
  PyObject* usual = PyDict_GetItemWithError(built_in, reinterpret_cast<PyObject*>(Py_TYPE(found.module.get())));
  if (usual == nullptr && PyErr_Occurred()) return false;
  found.is_skipped = PyDict_Size(children) == 0 && usual != nullptr && PyLong_AsSsize_t(usual) == found.count;
  PyObject* child = nullptr;
  for (at = 0; PyDict_Next(children, &at, nullptr, &child);)
    if (child != Py_None) waiting.emplace_back(Py_NewRef(child));
  const int has_hooks = PyObject_IsTrue(found.hooks.get());
  const int has_any = has_hooks != 0 ? has_hooks : PyObject_IsTrue(found.pre_hooks.get());
  found.has_hooks = has_any > 0;
  return has_any >= 0;
}

// `weak_identity`, with its table of living ones.
inline Owned identity_of(PyObject* object, PyObject* living, PyObject* make) {
  Owned address(PyLong_FromVoidPtr(object));
  PyObject* known = address ? PyDict_GetItemWithError(living, address.get()) : nullptr;
  if (known != nullptr) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* referent = nullptr;
    if (PyWeakref_GetRef(known, &referent) < 0) return Owned();
    Py_XDECREF(referent);
#else
    PyObject* referent = PyWeakref_GetObject(known);
#endif
    if (referent == object) return Owned(Py_NewRef(known));
  }
  return PyErr_Occurred() ? Owned() : Owned(PyObject_CallOneArg(make, object));
}

// Whether an attribute is a forward that sac has installed over none of the user's; -1 after an error.
inline int is_installed_forward(PyObject* name, PyObject* value) {
  const Words& w = words();
  if (!PyMethod_Check(value) || !PyUnicode_Check(name) || PyUnicode_Compare(name, w.forward) != 0) return 0;
  PyObject* owner = PyMethod_GET_SELF(value);
  Owned file(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(owner)), w.module));
  if (!file || !PyUnicode_Check(file.get())) return file ? 0 : -1;
  if (PyUnicode_Tailmatch(file.get(), w.ours, 0, PY_SSIZE_T_MAX, -1) != 1) return PyErr_Occurred() ? -1 : 0;
  Owned before(PyObject_GetAttr(owner, w.before));
  if (!before && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
  return PyErr_Occurred() ? -1 : before.get() == Py_None;
}

// What `modules_below` collects before it changes anything.
struct FoundModules {
  std::vector<FoundModule> all;
  std::vector<Owned> classes, identities;  // of the classes of the modules
  std::vector<size_t> kinds;               // of each module, the place of its class among these
};

// False if Python has to walk.
inline bool find_modules(FoundModules& found, const Standard& standard, FoundTables& attributes,
                         PyObject* const* args) {
  PyObject *seen = args[1], *built_in = args[2], *living = args[3], *make_identity = args[4];
  std::vector<Owned> waiting;
  std::unordered_set<PyObject*> met;
  waiting.emplace_back(Py_NewRef(args[0]));
  for (size_t i = 0; i < waiting.size(); ++i) {
    FoundModule one{};
    one.module = Owned(Py_NewRef(waiting[i].get()));
    if (!met.insert(one.module.get()).second) continue;
    if (PyDict_Size(seen) != 0) {
      Owned address(PyLong_FromVoidPtr(one.module.get()));
      const int is_seen = address ? PyDict_Contains(seen, address.get()) : -1;
      if (is_seen < 0) return false;
      if (is_seen != 0) continue;
    }
    auto* cls = reinterpret_cast<PyObject*>(Py_TYPE(one.module.get()));
    size_t kind = 0;
    while (kind < found.classes.size() && found.classes[kind].get() != cls) ++kind;
    if (kind == found.classes.size()) {
      if (!has_usual_access(Py_TYPE(one.module.get()), standard)) return false;
      Owned identity = identity_of(cls, living, make_identity);
      if (!identity) return false;
      found.classes.emplace_back(Py_NewRef(cls));
      found.identities.push_back(std::move(identity));
    }
    if (!look_at_module(one, standard, built_in, waiting, attributes)) return false;
    found.all.push_back(std::move(one));
    found.kinds.push_back(kind);
  }
  attributes.reverse();
  return true;
}

// The parts of `_add_modules_below`, and the modules in `seen`; false after an error.
inline bool add_modules(FoundModules& found, PyObject* seen, PyObject* parts) {
  const auto add = [parts](Owned part) { return part && PyList_Append(parts, part.get()) == 0; };
  for (size_t i = 0; i < found.all.size(); ++i) {
    FoundModule& one = found.all[i];
    Owned address(PyLong_FromVoidPtr(one.module.get())), number(PyLong_FromSsize_t(PyDict_Size(seen)));
    if (!address || !number || PyDict_SetItem(seen, address.get(), number.get()) < 0) return false;
    bool is_done = add(Owned(Py_NewRef(found.identities[found.kinds[i]].get())));
    is_done = is_done && add(Owned(Py_NewRef(one.training.get())));
    if (!one.is_skipped)
      is_done = is_done && add(Owned(PyLong_FromSsize_t(one.count))) &&
                add(Owned(PyLong_FromSsize_t(PyDict_Size(one.children.get()))));
    if (one.has_hooks)
      is_done = is_done && add(Owned(PySequence_Tuple(one.hooks.get()))) &&
                add(Owned(PySequence_Tuple(one.pre_hooks.get())));
    if (!is_done) return false;
  }
  return true;
}

// `_add_values` for one module: its attributes, from the last to the first.
inline bool add_values(Named* begin, Named* end, bool is_skipped, PyObject* plain, PyObject* parts,
                       PyObject* objects, PyObject* add_object) {
  while (end != begin) {
    --end;
    const int is_plain = PySet_Contains(plain, reinterpret_cast<PyObject*>(Py_TYPE(end->value.get())));
    const int is_ours =
        is_plain == 0 && !is_skipped ? is_installed_forward(end->name.get(), end->value.get()) : 0;
    if (is_plain < 0 || is_ours < 0) return false;
    if (is_skipped) {
      if (is_plain == 0 && PyList_Append(objects, end->value.get()) < 0) return false;
    } else if (is_plain != 0 || is_ours != 0) {
      if (PyList_Append(parts, is_ours != 0 ? Py_None : end->value.get()) < 0) return false;
    } else if (!Owned(PyObject_CallFunctionObjArgs(add_object, end->name.get(), end->value.get(), objects, nullptr))) {
      return false;
    }
  }
  return true;
}

// `FunctionFingerprint._add_module`: root, seen, `_BUILT_IN`, `_living`, `weak_identity`, `STANDARD_NAMES`, `PLAIN`,
// parts, owners, `_add_object`. Adds to `seen`, the parts and the owners. Returns the tables of the modules, see
// `ModuleTables`: their attributes (from the last module to the first) with the objects among them, their classes,
// submodules, parameters and flags, and those that have buffers, with these. Parameters and buffers are None if they
// are unusual.
inline PyObject* modules_below(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 10)) return nullptr;
  PyObject *seen = args[1], *plain = args[6], *parts = args[7], *owners = args[8], *add_object = args[9];
  if (!PyTuple_Check(args[5])) return left_to_python();
  const Standard standard(args[5]);
  FoundModules found;
  FoundTables attributes(PyTuple_GET_SIZE(args[5])), submodules(0), parameters(0);
  if (!find_modules(found, standard, attributes, args)) return left_to_python();
  const auto count = static_cast<Py_ssize_t>(found.all.size());
  Owned classes(PyList_New(0)), training(PyList_New(count)), buffers(PyList_New(0)), objects(PyList_New(0));
  if (!classes || !training || !buffers || !objects) return nullptr;
  bool has_usual_parameters = true, has_usual_buffers = true;
  for (Py_ssize_t i = 0; i < count; ++i) {
    FoundModule& one = found.all[i];
    if (PyDict_Size(one.children.get()) != 0) submodules.add(one.children.get());
    has_usual_parameters = has_usual_parameters && PyDict_CheckExact(one.parameters.get());
    if (has_usual_parameters && PyDict_Size(one.parameters.get()) != 0) parameters.add(one.parameters.get());
    has_usual_buffers = has_usual_buffers && PyDict_CheckExact(one.buffers.get());
    if (has_usual_buffers && PyDict_Size(one.buffers.get()) != 0) {
      Owned copy(PyDict_Copy(one.buffers.get())), pair(copy ? PyTuple_Pack(2, one.module.get(), copy.get()) : nullptr);
      if (!pair || PyList_Append(buffers.get(), pair.get()) < 0) return nullptr;
    }
    if (PyList_Append(owners, one.module.get()) < 0) return nullptr;
    PyList_SET_ITEM(training.get(), i, Py_NewRef(one.training.get()));
  }
  if (PyErr_Occurred()) return nullptr;
  for (Owned& cls : found.classes)
    if (PyList_Append(classes.get(), cls.get()) < 0) return nullptr;
  if (!add_modules(found, seen, parts)) return nullptr;
  Named* end = attributes.entries.data() + attributes.entries.size();
  for (Py_ssize_t i = 0; i < count; ++i) {
    Named* begin = end - attributes.sizes[count - 1 - i].second;
    if (!add_values(begin, end, found.all[i].is_skipped, plain, parts, objects.get(), add_object)) return nullptr;
    end = begin;
  }
  Owned recorded(attributes.given()), below(recorded ? submodules.given() : nullptr);
  Owned held(!below ? nullptr : has_usual_parameters ? parameters.given() : Py_NewRef(Py_None));
  if (!held) return nullptr;
  return PyTuple_Pack(7, recorded.get(), objects.get(), classes.get(), below.get(), held.get(), training.get(),
                      has_usual_buffers ? buffers.get() : Py_None);
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

// `_values_in_class`; appends to `found`. 0 if Python has to look, -1 after an error.
inline int add_values_in_class(PyObject* dict, bool with_methods, PyObject* plain, PyObject* found) {
  std::vector<Named> all;
  collect(dict, 0, all);
  for (auto& [name, value] : all) {
    PyTypeObject* type = Py_TYPE(value.get());
    if (!PyUnicode_CheckExact(name.get()) || !is_usual_class(type)) return 0;
    int is_needed = PySet_Contains(plain, reinterpret_cast<PyObject*>(type));
    if (is_needed >= 0) is_needed = is_needed == 0;
    if (is_needed == 1 && type == &PyFunction_Type) is_needed = with_methods ? may_hold(value.get(), plain) : 0;
    if (is_needed < 0) return 0;
    const bool is_special = PyUnicode_GetLength(name.get()) >= 2 && PyUnicode_ReadChar(name.get(), 0) == '_' &&
                            PyUnicode_ReadChar(name.get(), 1) == '_';
    if (is_needed == 1 && !is_special && PyList_Append(found, value.get()) < 0) return -1;
  }
  return 1;
}

// `_note_classes`: classes, whether with methods, `PLAIN`. Returns the attributes that may hold state, and what
// `TablesHolder` records of the classes.
inline PyObject* entries_of_classes(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  if (!has_count(nargs, 3)) return nullptr;
  const Py_ssize_t count = PyList_Size(args[0]);
  Owned values(PyList_New(0));
  if (count < 0 || !values) return nullptr;
  FoundTables entries(0);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* cls = PyList_GetItem(args[0], i);
    Owned dict = cls != nullptr && PyType_Check(cls) ? dict_of_table(cls) : Owned();
    const int is_done = dict ? add_values_in_class(dict.get(), args[1] == Py_True, args[2], values.get()) : 0;
    if (is_done < 0) return nullptr;
    if (is_done == 0) return left_to_python();
    entries.add(dict.get());
  }
  Owned given(entries.given()), recorded(given ? PySequence_GetSlice(given.get(), 1, 5) : nullptr);
  return recorded ? PyTuple_Pack(2, values.get(), recorded.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

}  // namespace sac
