// A simulated accelerator. Its tensors have the device type PrivateUse1 (called "sim" in Python) and storage of their
// own; each operator runs the processor's kernel on an alias of that storage. The arithmetic is therefore the
// processor's, and what is simulated are the rules of an accelerator:
//
//   - an operator refuses tensors of two devices, except for a processor scalar (0-dim) and for index tensors;
//   - the processor cannot read its memory: .numpy() raises, .item() and .tolist() copy;
//   - generators belong to it;
//   - float64 may be missing, as on Apple's MPS (simulated_device::refuse_float64);
//   - kernels, copies, and the points where the host waits for the device are counted.
//
// It cannot show speed, streams that overlap, memory limits, or the rounding of a vendor's libraries.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current_index = 0;

// ---- Counts: "kernel:aten::add.Tensor", "copy:to_device", "sync:aten::_local_scalar_dense", ... ----

std::mutex counts_lock;
std::unordered_map<std::string, int64_t> counts;
bool has_float64 = true;

void count(std::string name, int64_t by = 1) {
  const std::lock_guard<std::mutex> held(counts_lock);
  counts[std::move(name)] += by;
}

void require_format(at::ScalarType type) {
  TORCH_CHECK_TYPE(has_float64 || (type != at::kDouble && type != at::kComplexDouble),
      "Cannot make a tensor of ", type, " on this device, which has no float64. Please use float32 instead.");
}

// ---- Memory ----

struct SimAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto* memory = new at::DataPtr(c10::GetAllocator(at::kCPU)->allocate(bytes));
    return {memory->get(), memory, &release, {kSim, current_index}};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  static void release(void* memory) { delete static_cast<at::DataPtr*>(memory); }
};

SimAllocator sim_allocator;
REGISTER_ALLOCATOR(kSim, &sim_allocator);

// The same bytes under another device. The new storage keeps the old one alive.
c10::Storage relabelled(const c10::Storage& storage, c10::Device device) {
  auto* kept = new c10::Storage(storage);
  at::DataPtr data(storage.mutable_data(), kept, [](void* s) { delete static_cast<c10::Storage*>(s); }, device);
  at::Allocator* allocator = device.is_cpu() ? c10::GetAllocator(at::kCPU) : &sim_allocator;
  return {c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(data), allocator, /*resizable=*/true};
}

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage) {
  const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

bool is_sim(const at::Tensor& t) { return t.defined() && t.device().type() == kSim; }
at::Tensor on_host(const at::Tensor& t) { return is_sim(t) ? with_storage(t, relabelled(t.storage(), at::kCPU)) : t; }
at::Tensor on_sim(const at::Tensor& t, c10::Device device) {
  if (t.defined()) require_format(t.scalar_type());
  return t.defined() ? with_storage(t, relabelled(t.storage(), device)) : t;
}

// ---- Generators: the processor's, held by one that reports this device ----

struct SimGenerator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();

  explicit SimGenerator(c10::DeviceIndex index)
      : GeneratorImpl({kSim, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override {
    auto* twin = new SimGenerator(device_.index());
    twin->inner = inner.clone();
    return twin;
  }
};

at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all{at::make_generator<SimGenerator>(0), at::make_generator<SimGenerator>(1)};
  return all.at(index < 0 ? current_index : index);
}

at::Generator inner_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
      generator.device(), "'");
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// ---- What torch asks a backend for ----

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<SimGenerator>(i < 0 ? current_index : i);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kSim, current_index}; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  void setCurrentDevice(c10::DeviceIndex i) const override { current_index = i; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return std::exchange(current_index, i); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override {
    return i < 0 ? current_index : std::exchange(current_index, i);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(at::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = sim_allocator.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  static c10::DeviceIndex index_of(c10::Device d) { return d.has_index() ? d.index() : current_index; }
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device d) const override { return {kSim, std::exchange(current_index, index_of(d))}; }
  c10::Device getDevice() const override { return {kSim, current_index}; }
  void setDevice(c10::Device d) const override { current_index = index_of(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_index = index_of(d); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, index_of(d)));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { count("sync:stream"); }
  void synchronizeEvent(void*) const override { count("sync:event"); }
  void synchronizeDevice(c10::DeviceIndex) const override { count("sync:device"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

// ---- Operators that allocate, copy, or only change a view ----

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  require_format(c10::dtype_or_default(type));
  const c10::DeviceGuard guard(device.value_or(c10::Device(kSim)));
  return at::detail::empty_generic(size, &sim_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  require_format(c10::dtype_or_default(type));
  const c10::DeviceGuard guard(device.value_or(c10::Device(kSim)));
  return at::detail::empty_strided_generic(size, stride, &sim_allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type));
}

// A copy across the bus from or to pageable memory returns when it is done: the host waits, unless non_blocking.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (is_sim(to)) require_format(to.scalar_type());
  if (is_sim(from) && is_sim(to)) {
    count(from.device() == to.device() ? "kernel:aten::copy_" : "copy:between_devices");
  } else {
    const std::string way = is_sim(to) ? "to_device" : "to_host";
    count("copy:" + way);
    count("bytes:" + way, static_cast<int64_t>(from.nbytes()));
    if (!non_blocking) count("sync:" + way);
  }
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar item(const at::Tensor& t) {
  count("copy:to_host");
  count("sync:aten::_local_scalar_dense");
  return at::cpu::_local_scalar_dense(on_host(t));
}

at::Tensor& set_storage(at::Tensor& t, at::Storage s, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(t, s, offset, size, stride);
}
at::Tensor as_strided(const at::Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, at::IntArrayRef size) { return at::cpu::view(t, size); }

// ---- Operators for which torch would choose another kernel than on the processor ----

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  count("kernel:aten::convolution");
  return on_sim(at::convolution(on_host(x), on_host(weight), on_host(bias.value_or(at::Tensor())), stride, padding,
      dilation, transposed, output_padding, groups), x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& x,
    const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
    bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  count("kernel:aten::convolution_backward");
  const std::vector<int64_t> biases{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [dx, dweight, dbias] = at::convolution_backward(on_host(gradient), on_host(x), on_host(weight), biases, stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  return {on_sim(dx, x.device()), on_sim(dweight, x.device()), on_sim(dbias, x.device())};
}

// Without this, scaled_dot_product_attention would be decomposed here and fused on the processor.
int64_t fused_attention_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale, bool grouped) {
  constexpr int64_t decomposed = 0;  // SDPBackend::math
  if (mask && mask->requires_grad()) return decomposed;  // as on the processor; an alias does not require gradients
  const auto host_mask = mask ? std::optional<at::Tensor>(on_host(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(on_host(query), on_host(key), on_host(value), host_mask, dropout, causal, scale, grouped);
}

// ---- All other operators ----

// The host must learn a size, an error flag or a value from the device before these return.
const std::unordered_set<std::string> kWaiting = {"aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave",
    "aten::bincount", "aten::_linalg_check_errors", "aten::_linalg_eigh", "aten::_linalg_eigvals", "aten::_linalg_svd",
    "aten::linalg_eig", "aten::linalg_lstsq"};

// An index may lie on the host: torch moves it. For reads, x[index], it has done so (and expanded masks, which waits)
// before the call reaches us, so these are already counted. Writes, x[index] = y, do it in the kernel.
bool is_indexed_read(const std::string& name) { return name == "aten::index"; }
bool is_indexed_write(const std::string& name) { return name == "aten::_index_put_impl_"; }

bool is_mask(const at::Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; }

// The tensors of one call: device tensors on the way in become aliases on the host, results become tensors of the
// device. Two tensors that share storage share the alias, so that views and in-place results stay what they are.
class Call {
 public:
  Call(std::string name, std::optional<c10::Device> device) : name_(std::move(name)), device_(device) {}

  c10::Device device() const { return device_.value_or(c10::Device(kSim, current_index)); }

  at::Tensor enter(const at::Tensor& t) {
    if (!t.defined()) return t;
    const bool is_index = at::isIntegralType(t.scalar_type(), /*includeBool=*/true);
    if (t.device().is_cpu() && is_index && is_indexed_write(name_)) {
      count("copy:to_device");
      count("sync:to_device");
      return t;
    }
    if (t.device().is_cpu() && (t.dim() == 0 || (is_index && is_indexed_read(name_)))) return t;
    TORCH_CHECK(t.device() == device(), "Expected all tensors to be on the same device, but found at least two devices, ",
        device(), " and ", t.device(), "! (when checking arguments of ", name_, ")");
    for (const auto& [ours, host] : tensors_)
      if (ours.is_same(t)) return host;
    auto* identity = t.storage().unsafeGetStorageImpl();
    auto found = aliases_.find(identity);
    if (found == aliases_.end()) found = aliases_.emplace(identity, relabelled(t.storage(), at::kCPU)).first;
    originals_.emplace(found->second.unsafeGetStorageImpl(), t.storage());
    tensors_.emplace_back(t, with_storage(t, found->second));
    return tensors_.back().second;
  }

  // An operator with an `out` argument may have resized it; the alias then has new memory or a new shape.
  void take_back() const {
    for (const auto& [ours, host] : tensors_) {
      if (ours.storage().data() != host.storage().data()) {
        auto moved = relabelled(host.storage(), ours.device());
        auto* impl = ours.storage().unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(moved.unsafeGetStorageImpl()->set_data_ptr(at::DataPtr()));
        impl->set_nbytes(host.storage().nbytes());
      }
      if (ours.sizes() != host.sizes() || ours.strides() != host.strides())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  at::Tensor leave(const at::Tensor& t) const {
    if (!t.defined() || is_sim(t)) return t;
    for (const auto& [ours, host] : tensors_)
      if (host.is_same(t)) return ours;
    const auto original = originals_.find(t.storage().unsafeGetStorageImpl());
    if (original != originals_.end()) return with_storage(t, original->second);
    return on_sim(t, device());
  }

 private:
  std::string name_;
  std::optional<c10::Device> device_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_, originals_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
};

// The device of a call: that of its first tensor of this device, else of its `device` argument.
std::optional<c10::Device> device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> named;
  for (const auto& value : arguments) {
    if (value.isTensor() && is_sim(value.toTensor())) return value.toTensor().device();
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector())
        if (is_sim(t)) return t.device();
    if (value.isDevice() && value.toDevice().type() == kSim)
      named = c10::Device(kSim, SimGuard::index_of(value.toDevice()));
  }
  return named;
}

bool returns_a_view(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() && schema.returns()[0].alias_info() && !schema.returns()[0].alias_info()->isWrite();
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size(), first = stack->size() - n;
  Call call(schema.name(), device_of(c10::ArrayRef<c10::IValue>(stack->data() + first, n)));
  bool waits = kWaiting.count(schema.name()) > 0;
  for (size_t i = 0; i < n; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = call.enter(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> entered;
      for (const at::Tensor& t : value.toTensorVector()) entered.push_back(call.enter(t));
      value = std::move(entered);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> entered;
      for (const std::optional<at::Tensor> t : value.toOptionalTensorList()) {
        // x[mask] = y needs the number of entries of the mask; x[mask] = scalar is a fill.
        if (t && t->defined() && is_mask(*t)) waits |= is_indexed_write(schema.name()) && (*stack)[first + 2].toTensor().numel() != 1;
        entered.push_back(t && t->defined() ? std::optional<at::Tensor>(call.enter(*t)) : t);
      }
      value = std::move(entered);
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      value = inner_of(value.toGenerator());
    } else if (value.isNone() && schema.arguments()[i].name() == "generator") {
      value = inner_of(default_generator(call.device().index()));
    }
  }
  count((returns_a_view(schema) ? "view:" : "kernel:") + schema.name());
  if (waits) count("sync:" + schema.name());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.take_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.leave(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> left;
      for (const at::Tensor& t : value.toTensorVector()) left.push_back(call.leave(t));
      value = std::move(left);
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  // These have a kernel of their own on the processor (and on accelerators) and would be decomposed here.
  for (const char* fused : {"native_layer_norm", "native_group_norm", "silu_backward", "_stack", "addr"})
    m.impl(fused, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

// What Python asks for, as operators: no binding code to compile.
c10::Dict<std::string, int64_t> read_counts() {
  const std::lock_guard<std::mutex> held(counts_lock);
  c10::Dict<std::string, int64_t> read;
  for (const auto& [name, n] : counts) read.insert(name, n);
  return read;
}
void reset_counts() {
  const std::lock_guard<std::mutex> held(counts_lock);
  counts.clear();
}
void refuse_float64(bool refuse) { has_float64 = !refuse; }
int64_t current_device() { return current_index; }
void set_device(int64_t index) { current_index = static_cast<c10::DeviceIndex>(index); }
void manual_seed(int64_t index, int64_t seed) { default_generator(static_cast<c10::DeviceIndex>(index)).set_current_seed(seed); }
at::Tensor get_rng_state(int64_t index) { return default_generator(static_cast<c10::DeviceIndex>(index)).get_state(); }
void set_rng_state(int64_t index, const at::Tensor& state) {
  default_generator(static_cast<c10::DeviceIndex>(index)).set_state(state);
}

TORCH_LIBRARY(simulated_device, m) {
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  m.def("counts() -> Dict(str, int)", read_counts);
  m.def("reset() -> ()", reset_counts);
  m.def("refuse_float64(bool refuse) -> ()", refuse_float64);
  m.def("current_device() -> int", current_device);
  m.def("set_device(int index) -> ()", set_device);
  m.def("manual_seed(int index, int seed) -> ()", manual_seed);
  m.def("get_rng_state(int index) -> Tensor", get_rng_state);
  m.def("set_rng_state(int index, Tensor state) -> ()", set_rng_state);
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &::fused_attention_choice)
}
