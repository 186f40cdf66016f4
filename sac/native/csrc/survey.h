// Surveys of what a region's Python can reach: Note [Surveys] in sac/region/survey.py, which makes them.
//
// A survey is made once; what it asks for never changes. `survey_take` compares it with what is there now, in
// one pass, and returns the objects that it has found; `reached_holds` compares these with what is there later. While a
// table is compared, no Python runs; between two tables, only a class's own `__getattribute__`, if it has one.
#pragma once

#include "state.h"

#include <c10/util/SmallVector.h>

namespace sac {

enum class Look : uint8_t {  // what an entry must be; in the order of `Look` in survey.py
  ANY,
  PLAIN,       // of a class in `PLAIN`
  SAME,        // this very object
  PART,        // the same, or else another one of a class in `PLAIN`: then the function is another one
  KIND,        // of this class
  FUNCTION,    // this very function, with the same code and defaults, and without attributes
  TENSOR,      // of this class, without a graph
  EMPTY,       // a dict without entries
  INSTALLED,   // a forward that sac has installed over none of the user's
  PARAMETERS,  // a plain dict
  BUFFERS,     // a plain dict
  LEADS,       // of this class, and it has the table of a row
  MISSING,     // not there
  CLOSURE,     // a function of the same code, with its cells in the table of a row
};

enum class Source : uint8_t { ROOT, DICT_OF, ASKED, ITSELF, CLASS, OWNER, GIVEN };  // of a table; as in survey.py
enum class Form : uint8_t { ENTRIES, NAMES, ITEMS, CELLS, ORDERED };        // how a table is compared; as there

constexpr uint32_t NOT_KEPT = UINT32_MAX;

struct Place {  // an entry of a table
  Owned name, known;
  Look look;
  uint32_t row = 0, function = 0;  // the row that it leads to, and its function's parts
  uint32_t kept = NOT_KEPT;        // its number among the values of a `Reached`
};

struct FunctionParts {
  Owned code, defaults, title, file;
  bool has_dict;  // whether the dict of a function has a row too
};

struct Range {
  size_t begin = 0, end = 0;
};

struct SurveyRow {  // a table
  Source source;
  Form form;
  Owned given;
  size_t from;               // the value that leads to it, among those that are kept
  size_t first, begin, end;  // its places; entries before `first` are not part of the state
  Range kept, again, empty;  // its parts of what the survey has of all rows
  // Of the last comparison entry by entry: the version of the table (0: none), and whether a PART was another one.
  uint64_t version = 0;
  bool has_other_part = false;
};

struct ClassGuard {  // what must not have changed in a class; null is not compared
  Owned cls, mro, forward, dict, access, globals, found;
  bool is_module;
  unsigned int version = 0;  // of the class when this was last found; 0: none
};

// The parameters of all modules, as they were last found one by one.
struct FoundParameters {
  std::vector<uint64_t> versions;  // of the table of each module; 0: none
  std::vector<PyObject*> values;   // not held, and only valid while the tables have these versions
  Owned lengths, counts, names;    // of the tables that are not empty, as in `FoundTables::given`; they never change
};

constexpr size_t MOST_SPARE = 8;  // more calls of one region rarely wait for their backward

union Item {  // of what a `Reached` keeps
  PyObject* object;
  uint64_t version;
};

struct SurveyContent {
  SurveyContent(PyObject* names, PyObject* plain)
      : names(Py_NewRef(names)), plain(Py_NewRef(plain)), standard(names) {
    spare.reserve(MOST_SPARE);
  }

  Owned names, plain, root_type;
  Standard standard;
  std::vector<SurveyRow> rows;
  std::vector<Place> places;
  std::vector<FunctionParts> functions;
  std::vector<PyObject*> known;  // of the places that are kept
  std::vector<uint32_t> again;   // the places to be looked at even if the table has not changed
  std::vector<ClassGuard> guards;
  std::vector<size_t> modules, tensors;  // rows, places
  size_t parameters = 0, buffers = 0;    // their places in the row of a module
  FoundParameters found;
  // Of the last call that found no difference, only to be compared: the objects that led to the rows.
  std::vector<const PyObject*> owners;
  // Not held, and only valid while the table of their row has the row's version: the values that are kept, and those of
  // the EMPTY places.
  std::vector<PyObject*> values, empty;
  std::vector<std::unique_ptr<Item[]>> spare;  // see `Reached`

  size_t items() const { return 2 * rows.size() + known.size(); }
};

struct Survey {
  PyObject_HEAD
  SurveyContent* content;
};

// Of each row its table, and the value of each place that is kept: all but those that are not part of the state. A
// value that is what the survey knows of its place is held by the survey. Their memory is used again: a block of more than a
// thousand bytes makes malloc tidy up first, which takes longer than the rest of a pass.
struct Reached {
  PyObject_HEAD
  Survey* survey;
  Item* items;

  PyObject*& target(size_t row) { return items[row].object; }
  uint64_t& version(size_t row) { return items[survey->content->rows.size() + row].version; }  // of its table; 0: none
  PyObject*& value(size_t kept) { return items[2 * survey->content->rows.size() + kept].object; }
  PyObject* value(Place& place) { return value(place.kept); }

  void keep(Place& place, PyObject* object) {
    value(place.kept) = object;
    if (object != place.known.get()) Py_XINCREF(object);
  }
};

inline PyTypeObject* ReachedType = nullptr;

// -- Versions of tables and classes: Note [Versions] in sac/region/survey.py

#if PY_VERSION_HEX < 0x030C0000  // later ones have none, or share it with those who watch the dict
constexpr bool HAS_VERSIONS = true;
inline uint64_t version_of_dict(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }
inline unsigned int version_of_class(PyTypeObject* type) {
  return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
}
#else
constexpr bool HAS_VERSIONS = false;
inline uint64_t version_of_dict(PyObject*) { return 0; }
inline unsigned int version_of_class(PyTypeObject*) { return 0; }
#endif

inline bool uses_versions = HAS_VERSIONS;  // tests also run without

// `survey_versions`: whether surveys use versions, where Python has them. Returns whether they did.
inline PyObject* survey_versions(PyObject*, PyObject* wanted) {
  const bool before = uses_versions;
  uses_versions = HAS_VERSIONS && wanted == Py_True;
  return PyBool_FromLong(before);
}

// Of a table whose entries are all that it has, in this order, and in which Python exchanges no entry without a new
// version; 0 for all others. `owner`: the object that led to it.
inline uint64_t version_of(const SurveyRow& row, PyObject* owner, PyObject* table) {
  if (!uses_versions || !(row.form == Form::ENTRIES || row.form == Form::NAMES) || !PyDict_Check(table)) return 0;
  const bool is_of_object = row.source == Source::ROOT || row.source == Source::DICT_OF;
  if (is_of_object ? Py_TYPE(owner)->tp_setattro == PyObject_GenericSetAttr : row.source != Source::CLASS) return 0;
  return version_of_dict(table);
}

// -- One pass over all tables

inline bool is_empty(PyObject* table) {
  return (PyDict_CheckExact(table) || PyODict_CheckExact(table)) && PyDict_Size(table) == 0;
}

inline bool has_code(PyObject* object, FunctionParts& parts) {
  auto* function = reinterpret_cast<PyFunctionObject*>(object);
  return function->func_code == parts.code.get() && function->func_name == parts.title.get() &&
         function->func_defaults == parts.defaults.get() && function->func_module == parts.file.get();
}

inline bool has_no_attributes(PyObject* function) {
  PyObject* held = reinterpret_cast<PyFunctionObject*>(function)->func_dict;
  return held == nullptr || is_empty(held);
}

inline bool is_unchanged(PyObject* object, FunctionParts& parts, PyObject* plain) {
  auto* function = reinterpret_cast<PyFunctionObject*>(object);
  return has_code(object, parts) &&
         has_no_attributes(object) &&
         (function->func_kwdefaults == nullptr || may_hold(object, plain) == 0);
}

inline bool may_have_graph(PyObject* tensor) {
  try {
    const at::Tensor& value = THPVariable_Unpack(tensor);
    return value.requires_grad() && value.grad_fn() != nullptr;
  } catch (const std::exception&) {  // a view that an in-place write made unusable
    return true;
  }
}

inline bool has_replaced_none(PyObject* method) {
  Owned before(PyObject_GetAttr(PyMethod_GET_SELF(method), words().before));
  return before.get() == Py_None;
}

inline bool is_plain_value(SurveyContent& survey, PyTypeObject* type) {
  return is_usual_class(type) && PySet_Contains(survey.plain.get(), reinterpret_cast<PyObject*>(type)) == 1;
}

using Owners = c10::SmallVector<PyObject*, 64>;

// `owners`: of each row the object that has led to it. `is_same_function`: set to false if a PART is another one.
inline bool is_expected(SurveyContent& survey, Place& place, PyObject* value, Owners& owners,
                        bool& is_same_function) {
  if (value == nullptr) return place.look == Look::MISSING;
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  switch (place.look) {
    case Look::ANY:
      return true;
    case Look::PLAIN:
      return type == place.known.get() || is_plain_value(survey, Py_TYPE(value));
    case Look::PART:
      if (value == place.known.get()) return true;
      is_same_function = false;
      return is_plain_value(survey, Py_TYPE(value));
    case Look::SAME:
      return value == place.known.get();
    case Look::KIND:
      return type == place.known.get();
    case Look::FUNCTION:
      return value == place.known.get() && is_unchanged(value, survey.functions[place.function], survey.plain.get());
    case Look::TENSOR:
      return type == place.known.get() && !may_have_graph(value);
    case Look::EMPTY:
      return is_empty(value);
    case Look::INSTALLED:
      return PyMethod_Check(value) &&
             reinterpret_cast<PyObject*>(Py_TYPE(PyMethod_GET_SELF(value))) == place.known.get() &&
             has_replaced_none(value);
    case Look::PARAMETERS:
    case Look::BUFFERS:
      return PyDict_CheckExact(value);
    case Look::LEADS:
      if (type != place.known.get()) return false;
      if (owners[place.row] == nullptr) owners[place.row] = value;
      return owners[place.row] == value;
    case Look::CLOSURE: {
      FunctionParts& parts = survey.functions[place.function];
      if (!PyFunction_Check(value) || !has_code(value, parts)) return false;
      if (reinterpret_cast<PyFunctionObject*>(value)->func_kwdefaults != nullptr) return false;
      if (!parts.has_dict && !has_no_attributes(value)) return false;
      if (owners[place.row] == nullptr) owners[place.row] = value;
      return owners[place.row] == value;
    }
    case Look::MISSING:
      return false;
  }
  return false;
}

// Call `visit` with the place and the value of each entry; false if the names differ, or if `visit` has returned false.
template <typename Visit>
bool visit_entries(SurveyContent& survey, SurveyRow& row, PyObject* table, Visit visit) {
  size_t at = row.begin;
  if (row.form == Form::NAMES) {
    for (; at < row.end; ++at) {
      PyObject* value = PyDict_GetItemWithError(table, survey.places[at].name.get());
      if ((value == nullptr && PyErr_Occurred()) || !visit(at, value)) return false;
    }
    return true;
  }
  if (row.form == Form::CELLS) {
    PyObject* cells = PyFunction_GetClosure(table);
    if ((cells == nullptr ? 0 : PyTuple_GET_SIZE(cells)) != static_cast<Py_ssize_t>(row.end - row.begin)) return false;
    for (; at < row.end; ++at)
      if (!visit(at, PyCell_GET(PyTuple_GET_ITEM(cells, at - row.begin)))) return false;
    return true;
  }
  if (row.form == Form::ITEMS && PySet_CheckExact(table)) return PySet_GET_SIZE(table) == 0;  // only an empty one
  if (row.form == Form::ITEMS && PyTuple_CheckExact(table)) {
    if (PyTuple_GET_SIZE(table) != static_cast<Py_ssize_t>(row.end - row.begin)) return false;
    for (; at < row.end; ++at)
      if (!visit(at, PyTuple_GET_ITEM(table, at - row.begin))) return false;
    return true;
  }
  if (row.form == Form::ITEMS) {
    if (!PyList_CheckExact(table) || PyList_GET_SIZE(table) != static_cast<Py_ssize_t>(row.end - row.begin)) return false;
    for (; at < row.end; ++at)
      if (!visit(at, PyList_GET_ITEM(table, at - row.begin))) return false;
    return true;
  }
  if (!PyDict_Check(table) || PyDict_Size(table) != static_cast<Py_ssize_t>(row.end - row.begin)) return false;
  if (row.form == Form::ORDERED) {  // its order is not that of a dict
    Owned keys(PyODict_Type.tp_iter(table));
    for (; keys && at < row.end; ++at) {
      Owned key(PyIter_Next(keys.get()));
      if (key.get() != survey.places[at].name.get()) return false;
      PyObject* value = PyDict_GetItemWithError(table, key.get());
      if (value == nullptr || !visit(at, value)) return false;
    }
    return static_cast<bool>(keys);
  }
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t i = 0; PyDict_Next(table, &i, &name, &value); ++at)
    if (name != survey.places[at].name.get() || !visit(at, value)) return false;
  return true;
}

inline bool has_found(ClassGuard& guard) {
  if (guard.globals.get() == nullptr) return true;
  Owned found(PyObject_GetAttr(guard.globals.get(), words().found));
  return found.get() == guard.found.get();
}

inline bool is_as_known(SurveyContent& survey, ClassGuard& guard) {
  auto* type = reinterpret_cast<PyTypeObject*>(guard.cls.get());
  const Words& w = words();
  if (type->tp_mro != guard.mro.get()) return false;
  const unsigned int version = uses_versions ? version_of_class(type) : 0;
  if (version != 0 && version == guard.version) return (!guard.is_module || is_usual_class(type)) && has_found(guard);
  if (guard.dict.get() != nullptr && (_PyType_Lookup(type, w.dict) != guard.dict.get() ||
                                        _PyType_Lookup(type, w.access) != guard.access.get()))
    return false;
  if (guard.is_module && !has_usual_access(type, survey.standard)) return false;
  if (guard.forward.get() != nullptr && _PyType_Lookup(type, w.forward) != guard.forward.get()) return false;
  guard.version = version_of_class(type);
  return has_found(guard);
}

inline Owned referent_of(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* referent = nullptr;
  if (PyWeakref_GetRef(reference, &referent) < 0) PyErr_Clear();
  return Owned(referent);
#else
  PyObject* referent = PyWeakref_GetObject(reference);
  return referent == nullptr || referent == Py_None ? Owned() : Owned(Py_NewRef(referent));
#endif
}

inline Owned plain_dict_of(PyObject* object, bool asks) {
  Owned dict(asks ? PyObject_GetAttr(object, words().dict) : PyObject_GenericGetDict(object, nullptr));
  return dict && PyDict_CheckExact(dict.get()) ? std::move(dict) : Owned();
}

// The table of a row; null if there is none any more.
inline Owned table_of(SurveyRow& row, PyObject* root, Reached& reached) {
  switch (row.source) {
    case Source::ROOT:
      return plain_dict_of(root, false);
    case Source::DICT_OF:
      return plain_dict_of(reached.value(row.from), false);
    case Source::ASKED:  // its class has a `__getattribute__` of its own
      return plain_dict_of(reached.value(row.from), true);
    case Source::ITSELF:
      return Owned(Py_NewRef(reached.value(row.from)));
    case Source::CLASS:
      return dict_of_table(row.given.get());
    case Source::GIVEN:
      return Owned(Py_NewRef(row.given.get()));
    case Source::OWNER: {
      Owned owner = referent_of(row.given.get());
      if (!owner) return Owned();
      if (PyFunction_Check(owner.get())) return Owned(Py_NewRef(PyFunction_GetGlobals(owner)));
      return PyModule_Check(owner.get()) ? Owned(Py_NewRef(PyModule_GetDict(owner))) : Owned();
    }
  }
  return Owned();
}

struct Pass {
  SurveyContent& survey;
  Reached& reached;
  Owners owners;
  bool is_same_function = true;
};

// Compare a table entry by entry. If Python has a version of it, a later pass can take it for the same.
inline bool compare_entries(Pass& pass, size_t number, PyObject* owner, PyObject* table) {
  SurveyContent& survey = pass.survey;
  SurveyRow& row = survey.rows[number];
  const uint64_t version = version_of(row, owner, table);
  bool is_same = true;  // the function
  const bool holds = visit_entries(survey, row, table, [&](size_t at, PyObject* value) {
    Place& place = survey.places[at];
    if (place.kept != NOT_KEPT) pass.reached.keep(place, value);
    return is_expected(survey, place, value, pass.owners, is_same);
  });
  if (!is_same) pass.is_same_function = false;
  if (!holds || version == 0 || version_of(row, owner, table) != version) return holds;
  pass.reached.version(number) = version;
  row.version = version;
  row.has_other_part = !is_same;
  for (size_t i = row.kept.begin; i < row.kept.end; ++i) survey.values[i] = pass.reached.value(i);
  if (row.empty.begin == row.empty.end) return true;
  size_t next = row.empty.begin;
  return visit_entries(survey, row, table, [&](size_t at, PyObject* value) {
    if (survey.places[at].look == Look::EMPTY) survey.empty[next++] = value;
    return true;
  });
}

inline bool are_empty(SurveyContent& survey, SurveyRow& row) {
  const auto at = survey.empty.begin();
  return std::all_of(at + row.empty.begin, at + row.empty.end, is_empty);
}

// The same for a table that still has the version of its row: names and values are what they were.
inline bool compare_again(Pass& pass, size_t number) {
  SurveyContent& survey = pass.survey;
  SurveyRow& row = survey.rows[number];
  pass.reached.version(number) = row.version;
  if (row.has_other_part) pass.is_same_function = false;
  for (size_t i = row.kept.begin; i < row.kept.end; ++i) {
    PyObject* value = survey.values[i];
    pass.reached.value(i) = value;
    if (value != survey.known[i]) Py_XINCREF(value);
  }
  if (!are_empty(survey, row)) return false;
  for (size_t i = row.again.begin; i < row.again.end; ++i) {
    Place& place = survey.places[survey.again[i]];
    if (!is_expected(survey, place, pass.reached.value(place), pass.owners, pass.is_same_function)) return false;
  }
  return true;
}

// -- What a pass has found

inline PyObject* module_at(SurveyContent& survey, size_t number, PyObject* root, const Owners& owners) {
  const size_t row = survey.modules[number];
  return survey.rows[row].source == Source::ROOT ? root : owners[row];
}

// An entry of nn.Module itself.
inline PyObject* standard_at(SurveyContent& survey, size_t number, size_t place, Reached& reached) {
  return reached.value(survey.places[survey.rows[survey.modules[number]].begin + place]);
}

// The parameters of the modules as `TablesHolder` records them; null after an error.
inline Owned parameters_one_by_one(SurveyContent& survey, Reached& reached) {
  FoundTables tables(0);
  tables.entries.reserve(survey.found.values.size());
  FoundParameters found;
  for (size_t i = 0; i < survey.modules.size(); ++i) {
    PyObject* held = standard_at(survey, i, survey.parameters, reached);
    found.versions.push_back(version_of_dict(held));
    if (PyDict_Size(held) != 0) tables.add(held);
  }
  for (Named& one : tables.entries) found.values.push_back(one.value.get());
  Owned given(tables.given());
  if (!given) return given;
  found.lengths = Owned(Py_NewRef(PyTuple_GET_ITEM(given.get(), 1)));
  found.counts = Owned(Py_NewRef(PyTuple_GET_ITEM(given.get(), 2)));
  found.names = Owned(Py_NewRef(PyTuple_GET_ITEM(given.get(), 3)));
  std::swap(survey.found, found);  // what was there is freed when this is whole
  return given;
}

inline bool have_same_parameters(SurveyContent& survey, Reached& reached) {
  const auto& versions = survey.found.versions;
  if (!uses_versions || versions.size() != survey.modules.size()) return false;
  for (size_t i = 0; i < versions.size(); ++i) {
    const uint64_t version = version_of_dict(standard_at(survey, i, survey.parameters, reached));
    if (version == 0 || version != versions[i]) return false;
  }
  return true;
}

// The same, if no table has changed.
inline Owned parameters_of(SurveyContent& survey, Reached& reached) {
  FoundParameters& found = survey.found;
  if (!have_same_parameters(survey, reached)) return parameters_one_by_one(survey, reached);
  Owned lengths(Py_NewRef(found.lengths.get())), counts(Py_NewRef(found.counts.get())),
      names(Py_NewRef(found.names.get())), tables(PyList_New(PyList_GET_SIZE(lengths.get()))),
      values(PyList_New(PyList_GET_SIZE(names.get())));
  if (!tables || !values) return Owned();
  // To make a list may have run Python, in a finalizer.
  if (found.names.get() != names.get() || !have_same_parameters(survey, reached))
    return parameters_one_by_one(survey, reached);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values.get()); ++i)
    PyList_SET_ITEM(values.get(), i, Py_NewRef(found.values[static_cast<size_t>(i)]));
  Py_ssize_t next = 0;
  for (size_t i = 0; i < survey.modules.size(); ++i) {
    PyObject* held = standard_at(survey, i, survey.parameters, reached);
    if (PyDict_Size(held) != 0) PyList_SET_ITEM(tables.get(), next++, Py_NewRef(held));
  }
  return Owned(PyTuple_Pack(5, tables.get(), lengths.get(), counts.get(), names.get(), values.get()));
}

// Whether the function is the same, what was reached, what `ModuleTables` needs of the modules (themselves, their
// parameters as `TablesHolder` records them, their flags, and their buffers), and the values of the TENSOR places. Null
// after an error.
inline PyObject* given_of(SurveyContent& survey, PyObject* root, Reached& reached, const Owners& owners,
                          bool is_same_function) {
  const auto count = static_cast<Py_ssize_t>(survey.modules.size());
  Owned modules(PyTuple_New(count)), training(PyList_New(count)), buffers(PyList_New(0));
  Owned tensors(PyList_New(static_cast<Py_ssize_t>(survey.tensors.size())));
  if (!modules || !training || !buffers || !tensors) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto number = static_cast<size_t>(i);
    PyObject* module = module_at(survey, number, root, owners);
    PyTuple_SET_ITEM(modules.get(), i, Py_NewRef(module));
    PyList_SET_ITEM(training.get(), i, Py_NewRef(standard_at(survey, number, 0, reached)));
    PyObject* bound = standard_at(survey, number, survey.buffers, reached);
    if (PyDict_Size(bound) != 0) {
      Owned copy(PyDict_Copy(bound)), pair(copy ? PyTuple_Pack(2, module, copy.get()) : nullptr);
      if (!pair || PyList_Append(buffers.get(), pair.get()) < 0) return nullptr;
    }
  }
  for (size_t i = 0; i < survey.tensors.size(); ++i)
    PyList_SET_ITEM(tensors.get(), static_cast<Py_ssize_t>(i),
                    Py_NewRef(reached.value(survey.places[survey.tensors[i]])));
  Owned held = parameters_of(survey, reached);
  if (!held) return nullptr;
  return PyTuple_Pack(7, is_same_function ? Py_True : Py_False, reinterpret_cast<PyObject*>(&reached), modules.get(),
                      held.get(), training.get(), buffers.get(), tensors.get());
}

inline Owned reached_new(Survey* survey) {
  Owned made(ReachedType->tp_alloc(ReachedType, 0));
  if (!made) return made;
  auto* reached = reinterpret_cast<Reached*>(made.get());
  reached->survey = reinterpret_cast<Survey*>(Py_NewRef(reinterpret_cast<PyObject*>(survey)));
  SurveyContent& content = *survey->content;
  std::unique_ptr<Item[]> items;
  if (content.spare.empty()) {
    items.reset(new Item[content.items()]);
  } else {
    items = std::move(content.spare.back());
    content.spare.pop_back();
  }
  std::memset(items.get(), 0, content.items() * sizeof(Item));
  reached->items = items.release();
  return made;
}

// Whether no object has led to two rows. What was so in an earlier call is so if the objects have the same addresses.
inline bool are_distinct(SurveyContent& survey, const Owners& owners) {
  if (std::equal(owners.begin(), owners.end(), survey.owners.begin(), survey.owners.end())) return true;
  Owners distinct;
  for (PyObject* owner : owners)
    if (owner != nullptr) distinct.push_back(owner);
  std::sort(distinct.begin(), distinct.end());
  if (std::adjacent_find(distinct.begin(), distinct.end()) != distinct.end()) return false;
  survey.owners.assign(owners.begin(), owners.end());
  return true;
}

// `Survey.take`: the root. Returns None if something is not as it was; else see `given_of`.
inline PyObject* survey_take(Survey* self, PyObject* root) {
  HANDLE_TH_ERRORS
  SurveyContent& survey = *self->content;
  if (reinterpret_cast<PyObject*>(Py_TYPE(root)) != survey.root_type.get()) Py_RETURN_NONE;
  Owned made = reached_new(self);
  if (!made) return nullptr;
  auto& reached = *reinterpret_cast<Reached*>(made.get());
  for (ClassGuard& guard : survey.guards)
    if (!is_as_known(survey, guard)) return left_to_python();
  Pass pass{survey, reached, Owners(survey.rows.size(), nullptr)};
  pass.owners[0] = root;
  for (size_t i = 0; i < survey.rows.size(); ++i) {
    SurveyRow& row = survey.rows[i];
    PyObject* table = reached.target(i) = table_of(row, root, reached).release();
    if (table == nullptr) return left_to_python();
    PyObject* owner = row.source == Source::DICT_OF ? reached.value(row.from) : root;
    const uint64_t version = version_of(row, owner, table);
    const bool is_as_then = version != 0 && version == row.version;
    if (!(is_as_then ? compare_again(pass, i) : compare_entries(pass, i, owner, table))) return left_to_python();
  }
  if (!are_distinct(survey, pass.owners)) Py_RETURN_NONE;
  return given_of(survey, root, reached, pass.owners, pass.is_same_function);
  END_HANDLE_TH_ERRORS
}

// `Reached.holds`. Returns whether all tables hold these very objects. If not, they may still be the same.
inline PyObject* reached_holds(Reached* self, PyObject*) {
  HANDLE_TH_ERRORS
  SurveyContent& survey = *self->survey->content;
  for (size_t i = 0; i < survey.rows.size(); ++i) {
    SurveyRow& row = survey.rows[i];
    PyObject* table = self->target(i);
    const uint64_t version = self->version(i);
    if (version != 0 && version == version_of_dict(table)) {  // no value was exchanged
      if (row.empty.begin == row.empty.end) continue;
      if (version == row.version && are_empty(survey, row)) continue;
    }
    const bool is_same = visit_entries(survey, row, table, [&](size_t at, PyObject* value) {
      Place& place = survey.places[at];
      if (at - row.begin >= row.first) return value == self->value(place);
      return place.look != Look::EMPTY || is_empty(value);
    });
    if (!is_same) {
      PyErr_Clear();
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// `Reached.table`: the number of a row. Returns its table (of a class, the class), and the names and values of the
// entries that are part of the state.
inline PyObject* reached_table(Reached* self, PyObject* number) {
  HANDLE_TH_ERRORS
  SurveyContent& survey = *self->survey->content;
  const size_t at = PyLong_AsSize_t(number);
  if (at >= survey.rows.size()) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_IndexError, "no row %zu", at);
  SurveyRow& row = survey.rows[at];
  Owned names(PyList_New(0)), values(PyList_New(0));
  if (!names || !values) return nullptr;
  for (size_t i = row.begin + row.first; i < row.end; ++i) {
    PyObject *name = survey.places[i].name.get(), *value = self->value(survey.places[i]);
    if (value == nullptr) continue;
    if (PyList_Append(names.get(), name != nullptr ? name : Py_None) < 0 || PyList_Append(values.get(), value) < 0)
      return nullptr;
  }
  PyObject* table = row.source == Source::CLASS ? row.given.get() : self->target(at);
  return PyTuple_Pack(3, table, names.get(), values.get());
  END_HANDLE_TH_ERRORS
}

// -- The types, for Python

inline Owned owned(PyObject* object) { return Owned(object == Py_None ? nullptr : Py_NewRef(object)); }

// Whether an entry of this look may differ although it is the same object. EMPTY ones are looked at on their own.
inline bool depends_on_more(Look look) {
  switch (look) {
    case Look::KIND:  // it may have got another class
    case Look::FUNCTION:
    case Look::TENSOR:
    case Look::INSTALLED:
    case Look::LEADS:
    case Look::CLOSURE:
      return true;
    default:
      return false;
  }
}

// A row: source, what it is given or None, place, form, first, names or None, looks (bytes), known (a tuple).
inline bool add_row(SurveyContent& survey, PyObject* given) {
  int source = 0, form = 0;
  Py_ssize_t place = 0, first = 0;
  PyObject *what = nullptr, *names = nullptr, *looks = nullptr, *known = nullptr;
  if (!PyArg_ParseTuple(given, "iOninOSO!", &source, &what, &place, &form, &first, &names, &looks, &PyTuple_Type,
                        &known))
    return false;
  const Py_ssize_t length = PyBytes_GET_SIZE(looks);
  if (PyTuple_GET_SIZE(known) != length || (names != Py_None && PyTuple_Size(names) != length)) {
    PyErr_SetString(PyExc_ValueError, "a row of a survey has parts of different lengths");
    return false;
  }
  const size_t begin = survey.places.size();
  const size_t from = static_cast<size_t>(place) < begin ? survey.places[place].kept : 0;
  survey.rows.push_back(SurveyRow{static_cast<Source>(source), static_cast<Form>(form), owned(what), from,
                                  static_cast<size_t>(first), begin, begin + static_cast<size_t>(length)});
  SurveyRow& row = survey.rows.back();
  row.kept.begin = survey.known.size();
  row.again.begin = survey.again.size();
  row.empty.begin = survey.empty.size();
  for (Py_ssize_t i = 0; i < length; ++i) {
    Place one{Owned(), Owned(), static_cast<Look>(PyBytes_AS_STRING(looks)[i])};
    PyObject* object = PyTuple_GET_ITEM(known, i);
    if (names != Py_None) one.name = Owned(Py_NewRef(PyTuple_GET_ITEM(names, i)));
    if (one.look == Look::LEADS || one.look == Look::CLOSURE) {
      if (one.look == Look::LEADS) one.known = Owned(Py_NewRef(PyTuple_GetItem(object, 0)));
      one.row = static_cast<uint32_t>(PyLong_AsSize_t(PyTuple_GetItem(object, 1)));
    } else {
      one.known = Owned(Py_NewRef(object));
    }
    if (one.look == Look::FUNCTION || one.look == Look::CLOSURE) {
      auto* function =
          reinterpret_cast<PyFunctionObject*>(one.look == Look::FUNCTION ? object : PyTuple_GetItem(object, 0));
      one.function = static_cast<uint32_t>(survey.functions.size());
      survey.functions.push_back(FunctionParts{
          Owned(Py_NewRef(function->func_code)), Owned(Py_XNewRef(function->func_defaults)),
          Owned(Py_NewRef(function->func_name)), Owned(Py_XNewRef(function->func_module)),
          one.look == Look::CLOSURE && PyTuple_GetItem(object, 2) == Py_True});
    }
    if (one.look == Look::PARAMETERS) survey.parameters = static_cast<size_t>(i);
    if (one.look == Look::BUFFERS) survey.buffers = static_cast<size_t>(i);
    if (i >= first || (one.look != Look::ANY && one.look != Look::EMPTY)) {
      one.kept = static_cast<uint32_t>(survey.known.size());
      survey.known.push_back(one.known.get());
    }
    if (one.look == Look::EMPTY) survey.empty.push_back(nullptr);
    if (depends_on_more(one.look)) survey.again.push_back(static_cast<uint32_t>(survey.places.size()));
    survey.places.push_back(std::move(one));
  }
  row.kept.end = survey.known.size();
  row.again.end = survey.again.size();
  row.empty.end = survey.empty.size();
  survey.values.resize(survey.known.size());
  return !PyErr_Occurred();
}

// A guard: class, forward or None, whether modules are of it, whether it gives objects their dict, what knows its
// globals or None, the globals that this has found.
inline bool add_guard(SurveyContent& survey, PyObject* given) {
  PyObject *cls = nullptr, *forward = nullptr, *globals = nullptr, *found = nullptr;
  int is_module = 0, has_dict = 0;
  if (!PyArg_ParseTuple(given, "O!OppOO", &PyType_Type, &cls, &forward, &is_module, &has_dict, &globals, &found))
    return false;
  auto* type = reinterpret_cast<PyTypeObject*>(cls);
  survey.guards.push_back(ClassGuard{Owned(Py_NewRef(cls)), Owned(Py_XNewRef(type->tp_mro)), owned(forward),
                                     Owned(has_dict ? Py_XNewRef(_PyType_Lookup(type, words().dict)) : nullptr),
                                     Owned(has_dict ? Py_XNewRef(_PyType_Lookup(type, words().access)) : nullptr),
                                     owned(globals), owned(found), is_module != 0});
  return true;
}

inline bool add_numbers(std::vector<size_t>& numbers, PyObject* given) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(given); ++i) numbers.push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(given, i)));
  return !PyErr_Occurred();
}

// The class of the root, rows (a place is led to before the row that it leads to), guards, the rows of the modules, the
// places of tensors, `STANDARD_NAMES`, `PLAIN`.
inline PyObject* survey_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *root = nullptr, *rows = nullptr, *guards = nullptr, *modules = nullptr, *tensors = nullptr, *names = nullptr,
           *plain = nullptr;
  if (!PyArg_ParseTuple(args, "OO!O!O!O!O!O", &root, &PyTuple_Type, &rows, &PyTuple_Type, &guards, &PyTuple_Type,
                        &modules, &PyTuple_Type, &tensors, &PyTuple_Type, &names, &plain))
    return nullptr;
  auto content = std::make_unique<SurveyContent>(names, plain);
  content->root_type = Owned(Py_NewRef(root));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rows); ++i)
    if (!add_row(*content, PyTuple_GET_ITEM(rows, i))) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guards); ++i)
    if (!add_guard(*content, PyTuple_GET_ITEM(guards, i))) return nullptr;
  if (!add_numbers(content->modules, modules) || !add_numbers(content->tensors, tensors)) return nullptr;
  auto* self = reinterpret_cast<Survey*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->content = content.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

inline int survey_traverse(Survey* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (self->content == nullptr) return 0;
  for (SurveyRow& row : self->content->rows) Py_VISIT(row.given.get());
  for (Place& place : self->content->places) Py_VISIT(place.known.get());
  for (FunctionParts& parts : self->content->functions) Py_VISIT(parts.defaults.get());
  for (ClassGuard& guard : self->content->guards) {
    Py_VISIT(guard.cls.get());
    Py_VISIT(guard.mro.get());
    Py_VISIT(guard.forward.get());
    Py_VISIT(guard.dict.get());
    Py_VISIT(guard.access.get());
    Py_VISIT(guard.globals.get());
    Py_VISIT(guard.found.get());
  }
  Py_VISIT(self->content->root_type.get());
  Py_VISIT(self->content->found.names.get());
  return 0;
}

// No `tp_clear`: it never changes. All cycles that it is part of lead through a dict or a class.
inline void survey_dealloc(Survey* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete self->content;
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Visit>
int visit_owned(Reached* self, Visit visit) {
  if (self->items == nullptr) return 0;
  const auto& known = self->survey->content->known;
  const size_t rows = self->survey->content->rows.size();
  for (size_t i = 0; i < rows; ++i)
    if (const int result = self->target(i) != nullptr ? visit(self->target(i)) : 0; result != 0) return result;
  for (size_t i = 0; i < known.size(); ++i)
    if (PyObject* value = self->value(i); value != nullptr && value != known[i])
      if (const int result = visit(value); result != 0) return result;
  return 0;
}

inline int reached_traverse(Reached* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->survey);
  return visit_owned(self, [=](PyObject* one) { return visit(one, arg); });
}

inline void reached_dealloc(Reached* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  visit_owned(self, [](PyObject* one) {
    Py_DECREF(one);
    return 0;
  });
  if (self->items != nullptr) {
    std::unique_ptr<Item[]> items(self->items);
    auto& spare = self->survey->content->spare;
    if (spare.size() < MOST_SPARE) spare.push_back(std::move(items));
  }
  Py_CLEAR(self->survey);
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace sac
