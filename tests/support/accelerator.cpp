// An accelerator for tests, as torch's third-party devices are (`PrivateUse1`): memory, streams and a random generator of
// its own. The memory is the host's, and kernels are those of the CPU, to which operands are copied.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    return {data, data, &std::free, c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A generator of this device, which draws as one of the CPU.
struct Random final : c10::GeneratorImpl {
  explicit Random(uint64_t seed = 1)
      : GeneratorImpl(c10::Device(kType, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Random* clone_impl() const override {
    auto* copy = new Random();
    copy->cpu = cpu.clone();
    return copy;
  }
  at::Generator cpu;
};

const at::Generator& default_generator() {
  static const at::Generator one = at::make_generator<Random>();
  return one;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Random>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr data = memory.allocate(size);
    if (storage.nbytes() && size) std::memcpy(data.get(), storage.data(), std::min(storage.nbytes(), size));
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU, for as long as the given one lives.
at::Tensor on_cpu(const at::Tensor& own) {
  if (own.device().type() != kType) return own;
  auto options = at::TensorOptions().dtype(own.dtype()).device(at::kCPU);
  void* data = own.numel() ? const_cast<void*>(own.const_data_ptr()) : nullptr;
  return at::from_blob(data, own.sizes(), own.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& own) { return on_cpu(own).item(); }

at::Tensor& set(at::Tensor& own, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  own.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  own.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return own;
}

at::Tensor& set_whole(at::Tensor& own, at::Storage source) {
  const int64_t count = source.nbytes() / own.itemsize();
  return set(own, std::move(source), 0, {count}, {1});
}

const at::Tensor& resize(const at::Tensor& own, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* made = own.unsafeGetTensorImpl();
  made->set_sizes_contiguous(size);
  const size_t bytes = (made->storage_offset() + made->numel()) * made->itemsize();
  if (own.storage().nbytes() < bytes) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(own.storage(), bytes);
  return own;
}

at::Generator generator_of(const std::optional<at::Generator>& given) {
  const at::Generator& one = given.has_value() && given->defined() ? *given : default_generator();
  return static_cast<Random*>(one.unsafeGetGeneratorImpl())->cpu;
}

at::Tensor& bernoulli(at::Tensor& own, double p, std::optional<at::Generator> given) {
  on_cpu(own).bernoulli_(p, generator_of(given));
  return own;
}

at::Tensor& normal(at::Tensor& own, double mean, double deviation, std::optional<at::Generator> given) {
  on_cpu(own).normal_(mean, deviation, generator_of(given));
  return own;
}

at::Tensor& uniform(at::Tensor& own, double from, double to, std::optional<at::Generator> given) {
  on_cpu(own).uniform_(from, to, generator_of(given));
  return own;
}

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  at::Tensor kept = at::empty_like(x, x.options().dtype(at::kBool));
  if (train.value_or(true)) bernoulli(kept, 1 - p, std::nullopt);
  else kept.fill_(true);
  return {x.mul(kept).mul(train.value_or(true) ? 1 / (1 - p) : 1), kept};
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("set_.source_Storage_storage_offset", &set);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("resize_", &resize);
  library.impl("bernoulli_.float", &bernoulli);
  library.impl("normal_", &normal);
  library.impl("uniform_", &uniform);
  library.impl("native_dropout", &dropout);
}

// Autocast, as other accelerators register it: matmuls in the lower precision.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

}  // namespace

extern "C" PyObject* attach() {  // once; returns the default generator
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return THPGenerator_initDefaultGenerator(default_generator());
}
