// Ops whose results a region may save, under the rerun engine: the forward decides on them and holds what is saved,
// recomputation serves it. See Note [What is kept, and what is not] in sac/recompute/rerun.py.
#pragma once

#include "checksum.h"
#include "ids.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

namespace sac {

// What `_sums_of` in native_rerun.py asks for: the checksums of the tensors in an op's result; None if Python has to
// compute them.
inline bool add_sums(PyObject* out, std::vector<int64_t>& sums) {
  if (THPVariable_Check(out)) {
    sums.push_back(checksum_of(THPVariable_Unpack(out), false));
    return sums.back() >= 0;
  }
  if (!PyTuple_Check(out) && !PyList_Check(out)) return true;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(out); i++)
    if (!add_sums(PySequence_Fast_GET_ITEM(out, i), sums)) return false;
  return true;
}

inline PyObject* sums_of(PyObject*, PyObject* out) {
  HANDLE_TH_ERRORS
  std::vector<int64_t> sums;
  if (!add_sums(out, sums)) Py_RETURN_NONE;
  Owned found(checked(PyTuple_New(static_cast<Py_ssize_t>(sums.size()))));
  for (size_t i = 0; i < sums.size(); i++)
    PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), checked(PyLong_FromLongLong(sums[i])));
  return found.release();
  END_HANDLE_TH_ERRORS
}

// Whether the tensors of a saved value are what its op returned, so far as that can be found out here; see
// `RerunState.look_for_overwritten`.
inline bool is_as_saved(PyObject* value) {
  Owned sums(checked(PyObject_GetAttr(value, names().sums)));
  Owned results(checked(PyObject_GetAttr(value, names().results)));
  if (!PyTuple_Check(sums.get()) || !PyList_CheckExact(results.get())) return false;
  const Py_ssize_t count = PyTuple_GET_SIZE(sums.get());
  if (PyList_GET_SIZE(results.get()) != count) return false;
  for (Py_ssize_t i = 0; i < count; i++) {
    Owned held(checked(PyObject_GetAttr(PyList_GET_ITEM(results.get(), i), names().value)));
    PyObject* sum = PyTuple_GET_ITEM(sums.get(), i);
    if (reinterpret_cast<PyObject*>(Py_TYPE(held.get())) != THPVariableClass || !PyLong_CheckExact(sum)) return false;
    const int64_t now = checksum_of(THPVariable_Unpack(held.get()), false);
    if (now < 0 || now != key_of(sum)) return false;
  }
  return true;
}

// Saved values. Returns those that Python has to look at.
inline PyObject* not_as_saved(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  Owned found(checked(PyList_New(0)));
  for (Py_ssize_t i = 0; i < PyList_Size(values); i++) {
    PyObject* value = PyList_GET_ITEM(values, i);
    if (!is_as_saved(value) && PyList_Append(found.get(), value) < 0) return nullptr;
  }
  return PyErr_Occurred() != nullptr ? nullptr : found.release();
  END_HANDLE_TH_ERRORS
}

inline int64_t count_of(PyObject* counts, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(counts, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw python_error();
  return found != nullptr ? key_of(found) : 0;
}

inline void set_count(PyObject* counts, PyObject* key, int64_t count) {
  Owned number(checked(PyLong_FromLongLong(count)));
  if (PyDict_SetItem(counts, key, number.get()) < 0) throw python_error();
}

// A call that draws random numbers: its number among those of the op, see `ValueIds.draw`.
struct Drawn {
  Owned counts, key;
  int64_t number = 0;

  // With the GIL.
  Drawn(Ids& ids, const Site& site, Signature& signature)
      : counts(checked(PyObject_GetAttr(ids.owner, names().draws))),
        key(checked(PyObject_GetAttr(site.object, names().key))) {
    number = count_of(counts.get(), key.get()) + 1;
    Owned parts(checked(Py_BuildValue("(LOL)", static_cast<long long>(signature.hash), names().draw,
                                      static_cast<long long>(number))));
    signature.hash = static_cast<uint64_t>(PyObject_Hash(parts.get()));
    signature.made_of = -1;
  }

  void count() { set_count(counts.get(), key.get(), number); }
};

inline bool is_passed_generator(const Op& op, const Stack& stack, size_t base) {
  for (size_t i = 0; i < op.arguments.size(); i++)
    if (stack[base + i].isGenerator()) return true;
  return false;
}

// What the region decides on this op, if Python need not be asked.
inline Verdict verdict_on(const Site& site) { return site.must_save ? Verdict::SAVE : site.verdict; }

// Whether an op that the region may save can be run here.
inline bool is_decided_here(const Ids& ids, const Site* site) {
  if (site == nullptr || !ids.runs || site->written >= 0 || site->memory != Memory::NEW) return false;
  for (const Kind kind : site->op->results)
    if (kind != Kind::TENSOR) return false;
  return verdict_on(*site) == Verdict::SAVE || verdict_on(*site) == Verdict::ALTERNATE;
}

inline std::vector<Tensor> results_of(const Op& op, const Stack& stack, size_t base) {  // those that there are
  std::vector<Tensor> results;
  for (size_t i = 0; i < op.results.size(); i++)
    if (stack[base + i].toTensor().defined()) results.push_back(stack[base + i].toTensor());
  return results;
}

template <typename Function>
void for_each_argument(const Op& op, const std::vector<IValue>& arguments, Function function) {
  for (size_t i = 0; i < op.arguments.size(); i++) {
    if (op.arguments[i] == Kind::PLAIN || arguments[i].isNone()) continue;
    if (arguments[i].isTensor()) {
      if (arguments[i].toTensor().defined()) function(arguments[i].toTensor());
    } else {
      for (const IValue& one : arguments[i].toListRef())
        if (one.isTensor() && one.toTensor().defined()) function(one.toTensor());
    }
  }
}

// Whether results lie in new memory, and are not too large next to the parameters from which alone they are computed;
// see `_aliases` and `is_large`.
inline bool may_be_held(const Site& site, const std::vector<IValue>& arguments, const std::vector<Tensor>& results,
                        int64_t made_of, bool has_drawn) {
  bool are_new = true;
  size_t bytes = 0;
  for (const Tensor& result : results) {
    const StorageImpl* storage = storage_of(result.unsafeGetTensorImpl());
    for_each_argument(*site.op, arguments, [&](const Tensor& argument) {
      are_new = are_new && (storage == nullptr || storage_of(argument.unsafeGetTensorImpl()) != storage);
    });
    bytes += storage != nullptr ? storage->nbytes() : result.numel() * result.element_size();
  }
  constexpr int64_t SMALL_PART = 16;  // as in sac/recompute/parameter_only.py
  return are_new && (site.must_save || has_drawn || made_of <= 0 || SMALL_PART * static_cast<int64_t>(bytes) <= made_of);
}

// Whether `described` can say of an argument what Python's `describe` does: a value of these types is in Python what it
// is here. A dtype is a number here.
inline bool is_describable(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::StringType:
      return true;
    case c10::TypeKind::OptionalType:
      return is_describable(type->castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType:
      return is_describable(type->castRaw<c10::ListType>()->getElementType());
    default:
      return false;
  }
}

// Whether an argument is left out where torch hands an op to Python.
inline bool is_default(const c10::Argument& argument, const IValue& value) {
  return argument.default_value().has_value() && *argument.default_value() == value;
}

// How many arguments Python gets by position; those that may only be named come after `named`.
inline std::pair<size_t, size_t> positions_of(const c10::FunctionSchema& schema, const std::vector<IValue>& values) {
  size_t named = values.size();
  while (named > 0 && schema.arguments()[named - 1].kwarg_only()) named--;
  size_t count = named;
  while (count > 0 && is_default(schema.arguments()[count - 1], values[count - 1])) count--;
  return {count, named};
}

// Whether the arguments of an op can be described here.
inline bool are_describable(const c10::FunctionSchema& schema, const std::vector<IValue>& values) {
  for (size_t i = 0; i < values.size(); i++)
    if (!values[i].isNone() && !is_describable(schema.arguments()[i].real_type()) &&
        !is_default(schema.arguments()[i], values[i]))
      return false;
  return true;
}

inline PyObject* tuple_of(c10::IntArrayRef numbers) {
  PyObject* tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); i++) PyTuple_SET_ITEM(tuple, i, PyLong_FromLongLong(numbers[i]));
  return tuple;
}

inline PyObject* as_python(const IValue& value) {  // of a type that is describable; not a tensor
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isBool()) return PyBool_FromLong(value.toBool());
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  if (value.isString()) return PyUnicode_FromString(value.toStringRef().c_str());
  if (value.isComplexDouble())
    return PyComplex_FromDoubles(value.toComplexDouble().real(), value.toComplexDouble().imag());
  if (!value.isList()) return Py_NewRef(Py_None);
  Owned list(checked(PyList_New(0)));
  for (const IValue& one : value.toListRef())
    if (PyList_Append(list.get(), Owned(checked(as_python(one))).get()) < 0) throw python_error();
  return list.release();
}

// What `ValueIds._describe_one` returns for an argument in a forward.
inline PyObject* described(Ids& ids, const IValue& value) {
  const bool is_tensor = value.isTensor() && value.toTensor().defined();
  if (is_tensor && !is_number(value.toTensor())) {
    const Tensor& tensor = value.toTensor();
    const int64_t id = value_id_of(ids, tensor, address_of(storage_of(tensor.unsafeGetTensorImpl())));
    const ValueInfo* info = (*ids.tables)->find(id);
    return checked(Py_BuildValue("(LO(NNLOi))", static_cast<long long>(id),
                                 info != nullptr && info->is_external ? Py_True : Py_False, tuple_of(tensor.sizes()),
                                 tuple_of(tensor.strides()), static_cast<long long>(tensor.storage_offset()),
                                 torch::getTHPDtype(tensor.scalar_type()), lazy_bits(tensor)));
  }
  bool has_tensor = false;
  if (value.isList())
    for (const IValue& one : value.toListRef()) has_tensor = has_tensor || one.isTensor();
  if (has_tensor) {
    Owned parts(checked(PyList_New(0)));
    for (const IValue& one : value.toListRef())
      if (PyList_Append(parts.get(), Owned(described(ids, one)).get()) < 0) throw python_error();
    return checked(PyList_AsTuple(parts.get()));
  }
  Owned plain(checked(is_tensor ? as_python(number_in(value.toTensor())) : as_python(value)));
  return checked(PyObject_Str(plain.get()));
}

// What `ValueIds.describe` returns for the arguments of an op, as its handler in Python would get them.
inline PyObject* description_of(Ids& ids, const c10::FunctionSchema& schema, const std::vector<IValue>& values) {
  Owned parts(checked(PyList_New(0)));
  const auto [count, named] = positions_of(schema, values);
  for (size_t i = 0; i < values.size(); i++)
    if (i < count || (i >= named && !is_default(schema.arguments()[i], values[i])))
      if (PyList_Append(parts.get(), Owned(described(ids, values[i])).get()) < 0) throw python_error();
  return checked(PyList_AsTuple(parts.get()));
}

// The results as the region holds them: without a graph, in the structure in which the op returns them.
inline PyObject* held_results(const Op& op, const Stack& stack, size_t base) {
  const auto one = [&](size_t i) {
    const Tensor& tensor = stack[base + i].toTensor();
    return tensor.defined() ? checked(without_graph(tensor)) : Py_NewRef(Py_None);
  };
  if (op.results.size() == 1) return one(0);
  Owned tuple(checked(PyTuple_New(static_cast<Py_ssize_t>(op.results.size()))));
  for (size_t i = 0; i < op.results.size(); i++) PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), one(i));
  return tuple.release();
}

// An op that may be saved has run in the forward: decide as `decide` of table.py does, and hold what is saved; see
// `ForwardMode._run_decided`.
inline void decide(Ids& ids, const Site& site, const OperatorHandle& op, const std::vector<IValue>& arguments,
                   const Stack& stack, size_t base, const Signature& signature, bool has_drawn) {
  Gil gil;
  ids.may_save = true;
  const int64_t call = count_of(ids.calls, site.object);
  set_count(ids.calls, site.object, call + 1);
  Owned key(checked(PyLong_FromLongLong(static_cast<int64_t>(signature.hash))));
  const int64_t occurrence = count_of(ids.occurrences, key.get());
  set_count(ids.occurrences, key.get(), occurrence + 1);
  bool saves = true;
  if (verdict_on(site) == Verdict::ALTERNATE) {
    Owned rule(checked(PyLong_FromLong(site.rule)));
    const int64_t turn = count_of(ids.alternations, rule.get());
    set_count(ids.alternations, rule.get(), turn + 1);
    saves = turn % 2 == 0;
  }
  const auto results = results_of(*site.op, stack, base);
  if (!saves || !may_be_held(site, arguments, results, signature.made_of, has_drawn))
    return note_reads(ids, *site.op, arguments, 0);
  Owned description(description_of(ids, op.schema(), arguments));
  // A sparse result is known by its Python object, so a copy of it would be another value.
  const bool have_storages = std::all_of(results.begin(), results.end(), is_simple);
  Owned held(have_storages ? held_results(*site.op, stack, base) : checked(wrapped(*site.op, stack, base)));
  Owned done(checked(PyObject_CallMethod(ids.state, "hold", "OLOLOOOOO", site.object, static_cast<long long>(call),
                                         key.get(), static_cast<long long>(occurrence),
                                         signature.is_external ? Py_True : Py_False, description.get(), held.get(),
                                         have_storages ? Py_False : Py_True, has_drawn ? Py_True : Py_False)));
}

// -- Recomputation

enum class Found { VALUE, NOTHING, PYTHON };

// The tensor that a saved result holds, if it is served as it is; borrowed.
inline PyObject* as_it_is(PyObject* result) {
  Owned written(checked(PyObject_GetAttr(result, names().written)));
  if (written.get() != Py_False) return nullptr;
  Owned value(checked(PyObject_GetAttr(result, names().value)));
  return reinterpret_cast<PyObject*>(Py_TYPE(value.get())) == THPVariableClass ? value.get() : nullptr;
}

// What `RecomputeMode._find` finds for a call; if that is a value that can be served, its results are put into `out`.
// If Python has to look, nothing is counted. A value keeps the traits that it had in forward.
inline Found find_saved(Ids& ids, const Site& site, Signature& signature, std::vector<Tensor>& out) {
  Gil gil;
  Owned key(checked(PyLong_FromLongLong(static_cast<int64_t>(signature.hash))));
  const int64_t occurrence = count_of(ids.occurrences, key.get());
  Owned place(checked(Py_BuildValue("(OL)", key.get(), static_cast<long long>(occurrence))));
  PyObject* value = PyDict_GetItemWithError(ids.waiting, place.get());
  if (value == nullptr) {
    if (PyErr_Occurred() != nullptr) throw python_error();
    const int is_known = PyDict_Contains(ids.known, key.get());
    if (is_known < 0) throw python_error();
    if (is_known == 0) return Found::PYTHON;
  } else {
    if (PyDict_GET_SIZE(ids.fetched) > 0) return Found::PYTHON;
    if (is_set(value, names().overwritten)) return Found::PYTHON;
    Owned drawn(checked(PyObject_GetAttr(value, names().rng_after)));
    if (!PyList_Check(drawn.get()) || PyList_GET_SIZE(drawn.get()) > 0) return Found::PYTHON;
    Owned outputs(checked(PyObject_GetAttr(value, names().outputs)));
    const bool is_one = site.op->results.size() == 1;
    if (!is_one && !(PyTuple_Check(outputs.get()) || PyList_Check(outputs.get()))) return Found::PYTHON;
    const auto count = static_cast<Py_ssize_t>(site.op->results.size());
    if (!is_one && PySequence_Fast_GET_SIZE(outputs.get()) != count) return Found::PYTHON;
    for (Py_ssize_t i = 0; i < count; i++) {
      PyObject* result = is_one ? outputs.get() : PySequence_Fast_GET_ITEM(outputs.get(), i);
      PyObject* tensor = result != Py_None ? as_it_is(result) : nullptr;
      if (tensor == nullptr) return Found::PYTHON;
      out.push_back(THPVariable_Unpack(tensor));
    }
    signature.is_external = is_set(value, names().external);
    signature.made_of = -1;
    if (PyDict_DelItem(ids.waiting, place.get()) < 0) throw python_error();
  }
  set_count(ids.occurrences, key.get(), occurrence + 1);
  set_count(ids.calls, site.object, count_of(ids.calls, site.object) + 1);
  return value != nullptr ? Found::VALUE : Found::NOTHING;
}

}  // namespace sac
