// Operators of the simulated accelerator: memory, views and copies are here, all others are the CPU's.

#include "simulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simulated {
namespace {

using at::Tensor;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// A generator of the device: the CPU's numbers from a state of its own.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl({TYPE, device}, KEYS), inner(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* made = new DeviceGenerator(device_.index());
    made->inner = inner.clone();
    return made;
  }
  at::Generator inner;
};

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), KEYS, c10::dtype_or_default(dtype));
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto made = allocator()->allocate(bytes);
  if (const size_t kept = std::min(bytes, storage.nbytes())) {
    finish_uploads(current_stream(storage.device().index()));
    allocator()->copy_data(made.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(bytes);
}

const Tensor& place(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_and_strides(size, stride, offset);
  int64_t last = self.numel() ? offset + 1 : 0;
  for (size_t dim = 0; self.numel() && dim < size.size(); ++dim) {
    last += (size[dim] - 1) * stride[dim];
  }
  if (const size_t needed = last * self.itemsize(); self.storage().nbytes() < needed) {
    resize_bytes(self.storage(), needed);
  }
  return self;
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  return self.sizes() == size ? self : place(self, size, c10::contiguous_strides(size), self.storage_offset());
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  place(self, size, stride.size() == size.size() ? stride : c10::IntArrayRef(c10::contiguous_strides(size)), offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const auto device = source.device().type() == TYPE ? source.device() : target.device();
  const auto stream = current_stream(device.index());
  finish_uploads(stream);
  if (source.numel() == 0 && target.numel() == 0) {
    return target;
  }
  const auto shaped = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  const bool alike = shaped.dtype() == target.dtype() && shaped.is_conj() == target.is_conj() && shaped.is_neg() == target.is_neg();
  if (non_blocking && alike && shaped.is_cpu() && is_pinned(shaped.const_data_ptr())) {
    upload_later(stream, target, shaped);
    return target;
  }
  if (non_blocking && alike && target.is_cpu() && is_pinned(target.const_data_ptr())) {
    download_later(stream, target, shaped);
    return target;
  }
  if (source.is_cpu() || target.is_cpu()) {
    finish(stream);
  }
  Access access({memory_of(shaped), memory_of(target)});
  const auto from = shaped.is_cpu() ? shaped : on_host(shaped);
  (target.is_cpu() ? target : on_host(target)).copy_(from);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  const auto stream = current_stream(self.device().index());
  finish(stream);
  Access access({memory_of(self)});
  return on_host(self).item();
}

void record_stream(Tensor&, at::Stream) {}

// The CPU's operator on copies. Random numbers come from the device's generator.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto device = static_cast<c10::DeviceIndex>(current_device());
  for (const auto& value : torch::jit::last(*stack, arguments.size())) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == TYPE) {
      device = value.toTensor().device().index();
      break;
    }
  }
  finish_uploads(current_stream(device));
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto kind = arguments[i].type()->str();
    if (kind != "Generator?" && kind != "Generator") {
      continue;
    }
    auto& value = torch::jit::peek(*stack, i, arguments.size());
    const auto given = value.isNone() ? generator_of(device) : value.toGenerator();
    if (auto* own = dynamic_cast<DeviceGenerator*>(given.unsafeGetGeneratorImpl())) {
      value = own->inner;
    }
  }
  at::native::cpu_fallback(op, stack);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(TYPE); }
  at::Device getDeviceFromPtr(void* data) const override { return device_of(data); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return generator_of(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_bytes(storage, bytes); }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

const at::Generator& generator_of(c10::DeviceIndex device) {
  static auto* const made = [] {
    auto* all = new std::vector<at::Generator>;
    for (c10::DeviceIndex one = 0; one < DEVICES; ++one) {
      all->push_back(new_generator(one));
    }
    return all;
  }();
  return made->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? static_cast<c10::DeviceIndex>(current_device()) : device);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

// For the module in Python: torch has no function for the default generators of accelerators.
TORCH_LIBRARY(simulated, m) {
  m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    at::Generator(generator_of(static_cast<c10::DeviceIndex>(device))).set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("state(int device) -> Tensor", [](int64_t device) {
    return generator_of(static_cast<c10::DeviceIndex>(device)).get_state();
  });
  m.def("restore(int device, Tensor state) -> ()", [](int64_t device, const Tensor& state) {
    at::Generator(generator_of(static_cast<c10::DeviceIndex>(device))).set_state(state);
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

// A copy resolves conjugates and negatives itself: torch's fallback would clone them first, by a copy, without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  LOWER(mm) LOWER(matmul) LOWER(linear) LOWER(addmm) LOWER(bmm) LOWER(baddbmm) LOWER(conv2d) LOWER(scaled_dot_product_attention)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  FULL(layer_norm) FULL(nll_loss) FULL(mse_loss) FULL(logsumexp) FULL(rms_norm)
}

} // namespace simulated
