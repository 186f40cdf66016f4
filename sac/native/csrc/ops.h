// What the recorder knows of an op (from its schema) and of a call site (from the decision table, by way of Python).
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <pthread.h>

#include <array>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace sac {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using c10::StorageImpl;
using c10::TensorImpl;
using torch::jit::Stack;

enum class Kind : uint8_t { PLAIN, TENSOR, TENSORS, OPTIONAL_TENSORS };

inline Kind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Kind::TENSOR;
    case c10::TypeKind::OptionalType:
      return kind_of(type->castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType: {
      const auto element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::TensorType) return Kind::TENSORS;
      return kind_of(element) == Kind::TENSOR ? Kind::OPTIONAL_TENSORS : Kind::PLAIN;
    }
    default:
      return Kind::PLAIN;
  }
}

// One op of aten or prims, whose schemas are never taken back, so that the address of a schema names the op.
struct Op {
  explicit Op(const OperatorHandle& op) : handle(op) {
    for (const auto& argument : op.schema().arguments()) arguments.push_back(kind_of(argument.type()));
    for (const auto& result : op.schema().returns()) results.push_back(kind_of(result.type()));
    returns_one_tensor = results.size() == 1 && results[0] == Kind::TENSOR;
    returns_tensors = !results.empty();
    for (const Kind kind : results) returns_tensors = returns_tensors && kind == Kind::TENSOR;
  }

  // Whether the schema alone says how an op returns `count` tensors; see `structure_of` in fallback.py.
  bool has_fixed_result(size_t count) const {
    return returns_tensors ? count == results.size() : results.size() == 1 && results[0] == Kind::TENSORS;
  }

  OperatorHandle handle;
  std::vector<Kind> arguments, results;
  bool returns_one_tensor, returns_tensors;
};

// What becomes of an op's result. ALTERNATE saves every other call that the rule matches.
enum class Verdict : int { RECOMPUTE = 0, SAVE = 1, ALTERNATE = 2, ASK_PYTHON = 3 };

// Where an op's results lie: in new memory, or in that of an argument, perhaps as the argument itself.
enum class Memory : int { NEW = 0, VIEW = 1, UNSURE = 2 };

// What a tape has to know of an op that makes a tensor from none, or writes to an argument. Bits.
enum OnTape : int {
  ONLY_RERUN = 1,     // a tape needs Python for it
  FACTORY = 2,        // a constant, or fresh memory
  UNINITIALISED = 4,  // a factory of the latter
  FILLS = 8,          // it overwrites what it writes to completely; see `_fills` in recorder.py
  FILLS_PARTS = 16,   // it may be one of several that fill fresh memory
};

// An op at one module path that the library may record. Python asks for its results where the verdict says so.
struct Site {
  PyObject* object;  // the CallSite, owned
  std::unique_ptr<Op> op;
  Memory memory;
  Verdict verdict;
  int rule;  // its index, which counts a hit; -1 if no rule matches
  bool draws;
  bool is_random;  // two calls with equal arguments are two draws; see `ValueIds.draw`
  bool must_save;  // whatever the rules say; then no rule depends on the call
  int on_tape;     // see `OnTape`
  int written;     // the argument that the op writes to and returns; -1: none
  std::vector<bool> depends_on_inputs;  // per call: known not to be computed from parameters alone (with the GIL)
};

using PathSites = std::unordered_map<const void*, std::unique_ptr<Site>>;  // by address of the op's schema

// Threads read the tables of call sites without the GIL while another thread, with the GIL, adds a site. There is one
// lock in the process: a fork must not copy one that another thread holds.
inline std::shared_mutex sites_lock;

inline void survive_forks() {
  [[maybe_unused]] static const int done = pthread_atfork(
      [] { sites_lock.lock(); }, [] { sites_lock.unlock(); },
      [] { new (&sites_lock) std::shared_mutex(); });  // to unlock it takes the thread that has locked it
}

// What this thread has looked up lately.
struct LastSite {
  uint64_t table = 0;
  const void *path = nullptr, *schema = nullptr;
  Site* site = nullptr;
};

inline thread_local std::array<LastSite, 1024> last_sites;

// The ordinary call sites of one decision table. Python's dictionary of a path's call sites stands for the path.
struct Sites {
  PyObject_HEAD
  uint64_t number;  // no other table has had it
  std::unordered_map<PyObject*, std::unique_ptr<PathSites>>* paths;

  PathSites* at(PyObject* path) {
    std::shared_lock<std::shared_mutex> reading(sites_lock);
    const auto found = paths->find(path);
    return found == paths->end() ? nullptr : found->second.get();
  }

  // A site stays where it is as long as its table does, so a thread need not look twice.
  Site* find(PathSites* path, const void* schema) {
    const auto place = (reinterpret_cast<uintptr_t>(path) >> 4) * 31 + (reinterpret_cast<uintptr_t>(schema) >> 4);
    LastSite& last = last_sites[place % last_sites.size()];
    if (last.schema == schema && last.path == path && last.table == number) return last.site;
    std::shared_lock<std::shared_mutex> reading(sites_lock);
    const auto found = path->find(schema);
    if (found == path->end()) return nullptr;
    last = LastSite{number, path, schema, found->second.get()};
    return last.site;
  }
};

}  // namespace sac
