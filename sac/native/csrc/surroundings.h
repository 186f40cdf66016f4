// What surrounds a region when its forward begins, compared with what surrounds it later: see Note [Surroundings] in
// sac/region/ambient.py. Its readers of the same state are the reference.
#pragma once

#include "tape.h"
#include "walk.h"

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <type_traits>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>

namespace at::autocast {  // the header takes seconds to compile
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API bool is_autocast_cache_enabled();
}  // namespace at::autocast

namespace sac {

enum Part : int { GENERATOR = 1, HOST = 2, FLAGS = 4, THREAD = 8 };

// A Mersenne twister of Python or NumPy: 624 words and a position.
struct Twister {
  static constexpr size_t BYTES = 625 * 4;

  bool is_as_now() const { return at != nullptr && std::memcmp(words.data(), at, BYTES) == 0; }

  Owned owner;     // whose memory `at` is in
  const char* at;  // nullptr: unknown
  std::array<char, BYTES> words;
};

// The default generator of the CPU.
struct Engine {
  static Engine now() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    auto* impl = at::check_generator<at::CPUGeneratorImpl>(generator);
    return {impl->engine().data(), impl->next_float_normal_sample(), impl->next_double_normal_sample()};
  }

  bool operator==(const Engine& other) const {
    const auto &a = data, &b = other.data;
    return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.seeded_ == b.seeded_ &&
           a.state_ == b.state_ && next_float == other.next_float && next_double == other.next_double;
  }

  at::mt19937_data_pod data;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

struct Autocast {
  explicit Autocast(c10::DeviceType type)
      : type(type), enabled(at::autocast::is_autocast_enabled(type)), dtype(at::autocast::get_autocast_dtype(type)) {}

  bool operator==(const Autocast& other) const {
    return type == other.type && enabled == other.enabled && dtype == other.dtype;
  }

  c10::DeviceType type;
  bool enabled;
  at::ScalarType dtype;
};

using Flag = int64_t (*)(at::Context&);

// What the functions of Python return, by their names and arguments. A flag that a version of torch has under another
// name is not among these: the function is called.
inline const std::map<std::string, Flag>& known_flags() {
  static const auto* found = [] {
    auto* made = new std::map<std::string, Flag>();
    const auto add = [&]<typename Read>(const char* name, Read) {
      if constexpr (std::is_invocable_v<Read, at::Context&>)
        made->emplace(name, [](at::Context& context) { return static_cast<int64_t>(Read()(context)); });
    };
    const auto add_precision = [&]<at::Float32Backend backend, at::Float32Op op>(const char* name) {
      add(name, [](auto& c) -> decltype(c.float32Precision(backend, op)) { return c.float32Precision(backend, op); });
    };
    add("_get_flash_sdp_enabled", [](auto& c) -> decltype(c.userEnabledFlashSDP()) { return c.userEnabledFlashSDP(); });
    add("_get_mem_efficient_sdp_enabled",
        [](auto& c) -> decltype(c.userEnabledMemEfficientSDP()) { return c.userEnabledMemEfficientSDP(); });
    add("_get_math_sdp_enabled", [](auto& c) -> decltype(c.userEnabledMathSDP()) { return c.userEnabledMathSDP(); });
    add("_get_cudnn_sdp_enabled", [](auto& c) -> decltype(c.userEnabledCuDNNSDP()) { return c.userEnabledCuDNNSDP(); });
    add("_get_overrideable_sdp_enabled",
        [](auto& c) -> decltype(c.userEnabledOverrideableSDP()) { return c.userEnabledOverrideableSDP(); });
    add("_get_fa3_sdp_enabled", [](auto& c) -> decltype(c.userEnabledFA3SDP()) { return c.userEnabledFA3SDP(); });
    add("_get_sdp_priority_order", [](auto& c) -> decltype(static_cast<int64_t>(*c.sDPPriorityOrder().begin())) {
      int64_t order = 0;
      for (const auto one : c.sDPPriorityOrder()) order = order * 16 + static_cast<int64_t>(one) + 1;
      return order;
    });
    add("_get_cudnn_enabled", [](auto& c) -> decltype(c.userEnabledCuDNN()) { return c.userEnabledCuDNN(); });
    add("_get_cudnn_benchmark", [](auto& c) -> decltype(c.benchmarkCuDNN()) { return c.benchmarkCuDNN(); });
    add("_get_cudnn_deterministic", [](auto& c) -> decltype(c.deterministicCuDNN()) { return c.deterministicCuDNN(); });
    add("_get_mkldnn_enabled", [](auto& c) -> decltype(c.userEnabledMkldnn()) { return c.userEnabledMkldnn(); });
    add("_get_deterministic_algorithms",
        [](auto& c) -> decltype(c.deterministicAlgorithms()) { return c.deterministicAlgorithms(); });
    add("_get_deterministic_algorithms_warn_only",
        [](auto& c) -> decltype(c.deterministicAlgorithmsWarnOnly()) { return c.deterministicAlgorithmsWarnOnly(); });
    add("get_default_dtype", [](at::Context&) { return c10::get_default_dtype_as_scalartype(); });
    using enum at::Float32Backend;
    using enum at::Float32Op;
    add_precision.operator()<CUDA, MATMUL>("_get_fp32_precision_getter cuda matmul");
    add_precision.operator()<MKLDNN, MATMUL>("_get_fp32_precision_getter mkldnn matmul");
    add_precision.operator()<CUDA, CONV>("_get_fp32_precision_getter cuda conv");
    add_precision.operator()<CUDA, RNN>("_get_fp32_precision_getter cuda rnn");
    return made;
  }();
  return *found;
}

struct SurroundingsContent {
  Engine engine = Engine::now();
  std::shared_ptr<Twister> random, numpy;  // `numpy` is nullptr if there is no module
  Owned pending;                                 // the second number of a pair that `random` has drawn, or None
  Owned numpy_module;                            // null: it was not imported
  Owned asked;                                   // tuples of functions with arguments
  std::vector<Flag> flags;                       // some of them
  std::vector<int64_t> values;
  Owned questions, answers;                      // the others, and a list of what they returned
  Owned functional, attention, unusual;          // the module, the function in it, the module whose flags are not known
  std::vector<Autocast> autocast;
  bool caches = at::autocast::is_autocast_cache_enabled();
  int forgotten = 0;
};

struct Surroundings {
  PyObject_HEAD
  SurroundingsContent* content;
};

inline PyTypeObject* SurroundingsType = nullptr;

struct Sought {  // interned, for the whole process
  PyObject* numpy = PyUnicode_InternFromString("numpy.random");
  PyObject* source = PyUnicode_InternFromString("get_bit_generator");
  PyObject* pending = PyUnicode_InternFromString("gauss_next");
  PyObject* attention = PyUnicode_InternFromString("scaled_dot_product_attention");
};

inline const Sought& sought() {
  static const Sought found;
  return found;
}

inline Owned imported(PyObject* name) {  // null if it is not, without an error
  PyObject* modules = PyImport_GetModuleDict();
  return Owned(modules != nullptr && PyDict_Check(modules) ? Py_XNewRef(PyDict_GetItemWithError(modules, name))
                                                           : nullptr);
}

inline bool has_no_modes() {
  using TLS = at::impl::PythonTorchFunctionTLS;
  return TLS::stack_len() == 0 && TLS::get_disabled_state() == at::impl::TorchFunctionDisabledState::ENABLED;
}

inline Owned answers_to(PyObject* questions) {  // null after an error
  const Py_ssize_t count = PyTuple_GET_SIZE(questions);
  Owned found(PyList_New(count));
  for (Py_ssize_t i = 0; found && i < count; ++i) {
    PyObject* question = PyTuple_GET_ITEM(questions, i);
    PyObject* answer = PyObject_Vectorcall(PyTuple_GET_ITEM(question, 0), &PyTuple_GET_ITEM(question, 1),
                                           static_cast<size_t>(PyTuple_GET_SIZE(question) - 1), nullptr);
    if (answer == nullptr) return Owned();
    PyList_SET_ITEM(found.get(), i, answer);
  }
  return found;
}

// Each of these may leave an error, and then returns false.

inline bool has_usual_flags(SurroundingsContent& content) {
  if (imported(content.unusual.get()) || PyErr_Occurred()) return false;
  Owned attention(PyObject_GetAttr(content.functional.get(), sought().attention));
  return attention.get() == content.attention.get();
}

inline bool has_same_flags(SurroundingsContent& content) {
  if (!has_usual_flags(content)) return false;
  at::Context& context = at::globalContext();
  for (size_t i = 0; i < content.flags.size(); ++i)
    if (content.flags[i](context) != content.values[i]) return false;
  Owned now = answers_to(content.questions.get());
  if (!now) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(now.get()); ++i) {
    PyObject *one = PyList_GET_ITEM(now.get(), i), *before = PyList_GET_ITEM(content.answers.get(), i);
    if (one != before && PyObject_RichCompareBool(one, before, Py_EQ) != 1) return false;
  }
  return true;
}

inline bool has_same_numpy(SurroundingsContent& content) {
  Owned module = imported(sought().numpy);
  if (PyErr_Occurred() || module.get() != content.numpy_module.get()) return false;
  if (!module) return true;
  Owned source(PyObject_CallMethodNoArgs(module.get(), sought().source));
  return source && source.get() == content.numpy->owner.get() && content.numpy->is_as_now();
}

inline bool has_same_host(SurroundingsContent& content) {
  if (!content.random->is_as_now()) return false;
  Owned pending(PyObject_GetAttr(content.random->owner.get(), sought().pending));
  return pending.get() == content.pending.get() && has_same_numpy(content);
}

inline bool has_same_thread(SurroundingsContent& content) {
  if (!has_no_modes() || at::autocast::is_autocast_cache_enabled() != content.caches) return false;
  for (const Autocast& one : content.autocast)
    if (!(Autocast(one.type) == one)) return false;
  return true;
}

// Parts. Returns those of them that are not known to be as recorded.
inline PyObject* surroundings_differences(Surroundings* self, PyObject* asked) {
  HANDLE_TH_ERRORS
  const auto parts = static_cast<int>(PyLong_AsLong(asked));
  if (PyErr_Occurred()) return nullptr;
  SurroundingsContent& content = *self->content;
  int found = parts & content.forgotten;
  const auto look = [&](Part part, auto&& is_same) {
    if ((parts & ~content.forgotten & part) != 0 && !is_same(content)) found |= part;
  };
  look(GENERATOR, [](auto& one) { return Engine::now() == one.engine; });
  look(HOST, has_same_host);
  look(FLAGS, has_same_flags);
  look(THREAD, has_same_thread);
  if (PyErr_Occurred()) {  // Python meets it again, when it reads this part
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
  }
  return PyLong_FromLong(found);
  END_HANDLE_TH_ERRORS
}

// Parts: they are never the same again.
inline PyObject* surroundings_forget(Surroundings* self, PyObject* parts) {
  self->content->forgotten |= static_cast<int>(PyLong_AsLong(parts));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// The name of a function and its arguments; empty if they are not strings.
inline std::string spelt(PyObject* question) {
  Owned name(PyObject_GetAttrString(PyTuple_GET_ITEM(question, 0), "__name__"));
  std::string found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(question); ++i) {
    PyObject* word = i == 0 ? name.get() : PyTuple_GET_ITEM(question, i);
    const char* text = word != nullptr && PyUnicode_Check(word) ? PyUnicode_AsUTF8(word) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      return {};
    }
    found += (i == 0 ? "" : " ") + std::string(text);
  }
  return found;
}

// Read all flags; false after an error.
inline bool read_flags(SurroundingsContent& content, PyObject* asked, SurroundingsContent* earlier) {
  content.asked = Owned(Py_NewRef(asked));
  if (earlier != nullptr && earlier->asked.get() == asked) {
    content.flags = earlier->flags;
    content.questions = Owned(Py_NewRef(earlier->questions.get()));
  } else {
    Owned others(PyList_New(0));
    for (Py_ssize_t i = 0; others && i < PyTuple_GET_SIZE(asked); ++i) {
      PyObject* question = PyTuple_GET_ITEM(asked, i);
      const auto found = known_flags().find(spelt(question));
      if (found != known_flags().end())
        content.flags.push_back(found->second);
      else if (PyList_Append(others.get(), question) < 0)
        return false;
    }
    content.questions = Owned(others ? PyList_AsTuple(others.get()) : nullptr);
    if (!content.questions) return false;
  }
  for (const Flag flag : content.flags) content.values.push_back(flag(at::globalContext()));
  content.answers = answers_to(content.questions.get());
  return static_cast<bool>(content.answers);
}

inline std::shared_ptr<Twister> twister_at(PyObject* owner, unsigned long long address) {
  auto made = std::make_shared<Twister>();
  made->owner = Owned(Py_NewRef(owner));
  made->at = reinterpret_cast<const char*>(static_cast<uintptr_t>(address));
  if (made->at != nullptr) std::memcpy(made->words.data(), made->at, Twister::BYTES);
  return made;
}

// The record before or None (it shares what is the same with this one), Python's generator and the address of its words
// (0: unknown), the module `numpy.random` or None, its generator and the address of its words (0: unknown), questions,
// the module with the attention function, the usual one, the name of a module whose flags are unknown, device types.
inline PyObject* surroundings_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *before = nullptr, *random = nullptr, *module = nullptr, *numpy = nullptr, *questions = nullptr,
           *functional = nullptr, *attention = nullptr, *unusual = nullptr, *devices = nullptr;
  unsigned long long random_at = 0, numpy_at = 0;
  if (!PyArg_ParseTuple(args, "OOKOOKO!OOUO!", &before, &random, &random_at, &module, &numpy, &numpy_at, &PyTuple_Type,
                        &questions, &functional, &attention, &unusual, &PyTuple_Type, &devices))
    return nullptr;
  auto content = std::make_unique<SurroundingsContent>();
  SurroundingsContent* earlier =
      Py_TYPE(before) == SurroundingsType ? reinterpret_cast<Surroundings*>(before)->content : nullptr;
  const auto shared = [](const std::shared_ptr<Twister>& one, PyObject* owner, unsigned long long address) {
    return one && one->owner.get() == owner && one->is_as_now() ? one : twister_at(owner, address);
  };
  content->random = shared(earlier != nullptr ? earlier->random : nullptr, random, random_at);
  if (random_at != 0) content->pending = Owned(PyObject_GetAttr(random, sought().pending));
  if (random_at != 0 && !content->pending) return nullptr;
  if (module != Py_None) {
    content->numpy_module = Owned(Py_NewRef(module));
    content->numpy = shared(earlier != nullptr ? earlier->numpy : nullptr, numpy, numpy_at);
  }
  if (random_at == 0 || (module != Py_None && numpy_at == 0)) content->forgotten |= HOST;
  content->functional = Owned(Py_NewRef(functional));
  content->attention = Owned(Py_NewRef(attention));
  content->unusual = Owned(Py_NewRef(unusual));
  if (!read_flags(*content, questions, earlier)) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(devices); ++i) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(devices, i));
    if (name == nullptr) return nullptr;
    content->autocast.emplace_back(c10::Device(name).type());
  }
  auto* self = reinterpret_cast<Surroundings*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->content = content.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

inline void surroundings_dealloc(Surroundings* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete self->content;
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace sac
