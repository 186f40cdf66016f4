// Torch's table of what a Python interpreter does for it, wrapped where it hands an op, or a shallow copy, to a mode.
#pragma once

#include "record.h"
#include "rerun.h"

#include <atomic>
#include <dlfcn.h>

namespace sac {

// The mode on top of the stack, taken off it; what it writes to, if it is one of ours. As in a mode's own handler, what
// Python runs meanwhile (a finalizer, a signal handler) is not recorded, and finds nothing half done.
struct OurMode {
  OurMode() : length(c10::impl::TorchDispatchModeTLS::stack_len()) {
    PyObject* mode = stash.get_cur_mode()->ptr(getPyInterpreter());
    tape = tape_of(mode);
    // A deeper stack: the region has entered a mode of torch's own, such as `FakeTensorMode`, which goes below ours.
    if (tape == nullptr)
      ids = ids_of(mode);
    else if (tape->depth != length || tape->needs_attention)
      tape = nullptr;
  }

  const int64_t length;
  torch::torch_dispatch_mode::StashTorchDispatchModeGuard stash;
  Tape* tape = nullptr;  // that can record the next op
  Ids* ids = nullptr;
};

inline bool may_be_ours() {  // false for nearly all threads, nearly always
  return (recording != nullptr || rerunning != nullptr) && c10::impl::TorchDispatchModeTLS::any_modes_set(true);
}

inline const OperatorHandle& detach_op() {
  static const auto* op = new OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", ""));
  return *op;
}

// Record a shallow copy of a tensor, such as autograd makes of an op's result, as Python does: as an `aten::detach`.
inline c10::intrusive_ptr<TensorImpl> record_detach(Tape& tape, const TensorImpl* tensor) {
  const Site* site = site_of(tape, detach_op());
  if (site == nullptr || site->verdict != Verdict::RECOMPUTE || !is_plain(tensor)) return {};
  Tables& t = *tape.tables;
  const auto found = t.ids.find(const_cast<TensorImpl*>(tensor));
  const auto& counter = tensor->version_counter();
  if (found == t.ids.end() || !counter.enabled()) return {};
  const int value = found->second;
  if (!is_current(tape, tensor, value)) return {};
  c10::intrusive_ptr<TensorImpl> copy = tensor->shallow_copy_and_detach(c10::VariableVersion(0), true);
  Entry entry{site->object, site->op.get(), nullptr, static_cast<int>(t.pool.size()),
              static_cast<int>(t.reads.size()), 1, static_cast<int>(t.values.size())};
  t.pool.push_back(hole());
  t.reads.push_back(value);
  add_value(t, copy.get(), t.values[value].root, t.values[value].version);
  t.entries.push_back(entry);
  t.recorded++;
  count_hit(t, site->rule);
  clear_recent(t);
  return copy;
}

#define SAC_DELEGATE(result, name, parameters, arguments) \
  result name parameters const override { return inner->name arguments; }

struct Wrapped final : c10::impl::PyInterpreterVTable {
  explicit Wrapped(const c10::impl::PyInterpreterVTable* table) : inner(table) {}

  void dispatch(const OperatorHandle& op, Stack* stack) const override {
    if (may_be_ours()) {
      const OurMode mode;
      if (mode.tape != nullptr && record(*mode.tape, op, stack)) return;
      if (mode.ids != nullptr && rerun(*mode.ids, op, stack)) return;
    }
    inner->dispatch(op, stack);
  }

  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* tensor) const override {
    if (may_be_ours()) {
      const OurMode mode;
      if (mode.tape != nullptr)
        if (auto copy = record_detach(*mode.tape, tensor)) return copy;
      if (mode.ids != nullptr)
        if (auto copy = rerun_detach(*mode.ids, tensor)) return copy;
    }
    return inner->detach(tensor);
  }

  SAC_DELEGATE(std::string, name, (), ())
  SAC_DELEGATE(void, incref, (PyObject * object), (object))
  SAC_DELEGATE(void, decref, (PyObject * object), (object))
  SAC_DELEGATE(bool, try_incref, (const c10::impl::PyObjectSlot& slot), (slot))
  SAC_DELEGATE(size_t, refcnt, (PyObject * object), (object))
  SAC_DELEGATE(void, reportErrorCallback, (PyObject * callback, c10::DispatchKey key), (callback, key))
  SAC_DELEGATE(void, python_op_registration_trampoline,
               (const OperatorHandle& op, c10::DispatchKey key, c10::DispatchKeySet keys, Stack* stack, bool with_keys,
                bool with_op),
               (op, key, keys, stack, with_keys, with_op))
  SAC_DELEGATE(void, throw_abstract_impl_not_imported_error,
               (std::string op, const char* module, const char* context), (op, module, context))
  SAC_DELEGATE(void, python_dispatcher, (const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack),
               (op, keys, stack))
  SAC_DELEGATE(bool, is_contiguous, (const TensorImpl* t, at::MemoryFormat format), (t, format))
  SAC_DELEGATE(c10::SymBool, sym_is_contiguous, (const TensorImpl* t, at::MemoryFormat format), (t, format))
  SAC_DELEGATE(bool, is_strides_like, (const TensorImpl* t, at::MemoryFormat format), (t, format))
  SAC_DELEGATE(bool, is_non_overlapping_and_dense, (const TensorImpl* t), (t))
  SAC_DELEGATE(c10::Device, device, (const TensorImpl* t), (t))
  SAC_DELEGATE(int64_t, dim, (const TensorImpl* t), (t))
  SAC_DELEGATE(c10::IntArrayRef, strides, (const TensorImpl* t), (t))
  SAC_DELEGATE(c10::IntArrayRef, sizes, (const TensorImpl* t), (t))
  SAC_DELEGATE(c10::SymIntArrayRef, sym_sizes, (const TensorImpl* t), (t))
  SAC_DELEGATE(c10::Layout, layout, (const TensorImpl* t), (t))
  SAC_DELEGATE(int64_t, numel, (const TensorImpl* t), (t))
  SAC_DELEGATE(c10::SymInt, sym_numel, (const TensorImpl* t), (t))
  SAC_DELEGATE(c10::SymIntArrayRef, sym_strides, (const TensorImpl* t), (t))
  SAC_DELEGATE(c10::SymInt, sym_storage_offset, (const TensorImpl* t), (t))
  SAC_DELEGATE(void, trace_gpu_event_creation, (c10::DeviceType d, uintptr_t e), (d, e))
  SAC_DELEGATE(void, trace_gpu_event_deletion, (c10::DeviceType d, uintptr_t e), (d, e))
  SAC_DELEGATE(void, trace_gpu_event_record, (c10::DeviceType d, uintptr_t e, uintptr_t s), (d, e, s))
  SAC_DELEGATE(void, trace_gpu_event_wait, (c10::DeviceType d, uintptr_t e, uintptr_t s), (d, e, s))
  SAC_DELEGATE(void, trace_gpu_memory_allocation, (c10::DeviceType d, uintptr_t p), (d, p))
  SAC_DELEGATE(void, trace_gpu_memory_deallocation, (c10::DeviceType d, uintptr_t p), (d, p))
  SAC_DELEGATE(void, trace_gpu_stream_creation, (c10::DeviceType d, uintptr_t s), (d, s))
  SAC_DELEGATE(void, trace_gpu_device_synchronization, (c10::DeviceType d), (d))
  SAC_DELEGATE(void, trace_gpu_stream_synchronization, (c10::DeviceType d, uintptr_t s), (d, s))
  SAC_DELEGATE(void, trace_gpu_event_synchronization, (c10::DeviceType d, uintptr_t e), (d, e))
  SAC_DELEGATE(void, reset_backward_hooks, (const TensorImpl* t), (t))

  const c10::impl::PyInterpreterVTable* inner;
};

#undef SAC_DELEGATE

// The library in which an object's virtual table lies.
inline std::string library_of(const void* object) {
  Dl_info found{};
  return dladdr(*static_cast<void* const*>(object), &found) != 0 && found.dli_fname != nullptr ? found.dli_fname : "";
}

// Put our table in the place of torch's, for good; return what stands in the way, or an empty string.
inline PyObject* wrap_interpreter(PyObject*, PyObject*) {
  static bool is_wrapped = false;  // read and written with the GIL
  if (!is_wrapped) {
    auto* interpreter = getPyInterpreter();
    Dl_info torchs{};
    dladdr(reinterpret_cast<const void*>(&getPyInterpreter), &torchs);
    if (library_of(interpreter->vtable_) != torchs.dli_fname)
      return PyUnicode_FromString("another extension has replaced torch's interpreter table");
    // Never freed: a thread may be inside of it when the process ends.
    const c10::impl::PyInterpreterVTable* table = new Wrapped(interpreter->vtable_);
    __atomic_store_n(&interpreter->vtable_, table, __ATOMIC_RELEASE);
    is_wrapped = true;
  }
  return PyUnicode_FromString("");
}

}  // namespace sac
