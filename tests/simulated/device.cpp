// CUDA devices that are not there: memory of the host under their names, and what C++ asks of a device: which one and
// which stream is current, how many there are, a choice of attention. A CPU build of torch has none of it.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>

using namespace c10;
using std::optional;
namespace {

constexpr auto CUDA = DeviceType::CUDA;
constexpr int kDevices = 2;
constexpr size_t kSpace = size_t(1) << 40;  // addresses of one device; nothing is behind them until it is written
constexpr size_t kRound = 512;              // as torch's allocator rounds
constexpr size_t kPoisoned = size_t(1) << 24;

struct Block {
  size_t size;
  int64_t owner;  // the pool of a graph, or minus the stream that it was allocated on: whose next allocations may have it
};
struct Memory {
  char* base = nullptr;
  size_t end = 0;
  std::map<size_t, Block> live;                      // by offset
  std::map<int64_t, std::map<size_t, size_t>> idle;  // by owner: offset -> bytes
  int64_t allocated = 0, peak = 0;
};
Memory memory[kDevices];
std::mutex lock;
thread_local int current = 0;
thread_local int64_t streams[kDevices] = {0, 0};
thread_local int64_t pool = 0;
bool poisons = true;

int device_of_address(const void* address) {
  for (int i = 0; i < kDevices; i++)
    if (address >= memory[i].base && address < memory[i].base + kSpace) return i;
  return -1;
}

void release(void* address) {
  if (address == nullptr) return;
  int i = device_of_address(address);
  int64_t freed, total;
  {
    std::lock_guard<std::mutex> guard(lock);
    Memory& m = memory[i];
    size_t offset = static_cast<char*>(address) - m.base;
    auto [size, owner] = m.live.at(offset);
    m.live.erase(offset);
    m.allocated -= size;
    freed = size, total = m.allocated;
    if (poisons && size <= kPoisoned && owner <= 0) std::memset(address, 0xff, size);
    if (!poisons) madvise(address, size, MADV_DONTNEED);
    m.idle[owner][offset] = size;
  }
  reportMemoryUsageToProfiler(address, -freed, total, total, Device(CUDA, i));
}

struct Allocating final : Allocator {
  DataPtr allocate(size_t n) override {
    Device device(CUDA, current);
    if (n == 0) return {nullptr, nullptr, &release, device};
    size_t size = (n + kRound - 1) / kRound * kRound;
    size_t offset;
    int64_t total;
    Memory& m = memory[current];
    {
      std::lock_guard<std::mutex> guard(lock);
      if (m.base == nullptr) {
        void* found = mmap(nullptr, kSpace, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(found != MAP_FAILED, "no address space for a simulated device");
        m.base = static_cast<char*>(found);
      }
      int64_t owner = pool ? pool : -streams[current];
      auto& idle = m.idle[owner];
      auto best = idle.end();
      for (auto it = idle.begin(); it != idle.end(); ++it)
        if (it->second >= size && (best == idle.end() || it->second < best->second)) best = it;
      if (best != idle.end()) {
        offset = best->first;
        if (size_t left = best->second - size) idle[offset + size] = left;
        idle.erase(best);
      } else {
        offset = m.end;
        m.end += size;
        TORCH_CHECK(m.end < kSpace, "the simulated device is full");
      }
      m.live[offset] = {size, owner};
      m.allocated += size;
      m.peak = std::max(m.peak, m.allocated);
      total = m.allocated;
    }
    void* address = m.base + offset;
    if (poisons && size <= kPoisoned) std::memset(address, 0xff, size);
    reportMemoryUsageToProfiler(address, size, total, total, device);
    return {address, address, &release, device};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};
Allocating allocator;

// Its numbers are the host's, drawn from a generator of the host that is made of this seed and offset for each op.
struct Draws final : GeneratorImpl {
  explicit Draws(DeviceIndex i) : GeneratorImpl(Device(CUDA, i), DispatchKeySet(DispatchKey::CUDA)) {}
  uint64_t seed_ = default_rng_seed_val, offset_ = 0;
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return seed_ = c10::detail::getNonDeterministicRandom(), offset_ = 0, seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    at::TensorBase made = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(made.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return made.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* made = new Draws(device().index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
};

const at::Generator& default_generator(DeviceIndex i) {
  static at::Generator made[kDevices] = {at::make_generator<Draws>(0), at::make_generator<Draws>(1)};
  return made[i >= 0 ? i : current];
}

// As on a device with one context: the current device and its streams are a thread's own.
struct Guard final : impl::NoOpDeviceGuardImpl<CUDA> {
  Device exchangeDevice(Device to) const override {
    Device before(CUDA, current);
    if (to.index() >= 0) current = to.index();
    return before;
  }
  Device getDevice() const override { return Device(CUDA, current); }
  void setDevice(Device to) const override { exchangeDevice(to); }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index() >= 0 ? to.index() : current; }
  Stream getStream(Device d) const noexcept override {
    int i = d.index() >= 0 ? d.index() : current;
    return Stream(Stream::UNSAFE, Device(CUDA, i), streams[i]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream to) const noexcept override {
    Stream before = getStream(to.device());
    streams[to.device_index()] = to.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<Draws>(i >= 0 ? i : current); }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex i) const override { current = i; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return std::exchange(current, int(i)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return std::exchange(current, int(i)); }
  at::Device getDeviceFromPtr(void* address) const override { return at::Device(CUDA, device_of_address(address)); }
  at::Allocator* getPinnedMemoryAllocator() const override { return GetAllocator(DeviceType::CPU); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(DeviceIndex) const override {}
};

optional<Device> place(optional<Device> device) { return device.value_or(Device(CUDA, current)); }

at::Tensor empty(
    at::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device> device,
    optional<bool>, optional<at::MemoryFormat> format) {
  OptionalDeviceGuard guard(place(device));
  return at::detail::empty_generic(
      size, &allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<at::Device> device, optional<bool>) {
  OptionalDeviceGuard guard(place(device));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

void nothing(void*) {}

// The same memory as a tensor of the host; it does not keep the memory.
at::Tensor as_host(const at::Tensor& x) {
  Storage storage(Storage::use_byte_size_t(), x.storage().nbytes(),
                  DataPtr(x.storage().mutable_data(), nullptr, &nothing, Device(DeviceType::CPU)), nullptr, false);
  auto made = at::detail::make_tensor<TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::CPU), x.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return made;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, optional<at::MemoryFormat> format) {
  OptionalDeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor& set_nothing(at::Tensor& self) {
  OptionalDeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, Storage(Storage::use_byte_size_t(), 0, &allocator, true), 0, {0}, {});
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }

// torch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for compute capability 9.0, without cuDNN.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const optional<at::Tensor>& mask,
    double dropout_p, bool is_causal, optional<double> scale, bool enable_gqa) {
  auto& context = at::globalContext();
  auto type = query.scalar_type();
  bool half = type == at::kHalf || type == at::kBFloat16, plain = query.dim() == 4 && query.size(1) > 0;
  plain = plain && query.size(2) && key.size(2) && query.stride(-1) == 1 && key.stride(-1) == 1 && value.stride(-1) == 1;
  bool same_width = query.size(-1) == key.size(-1) && query.size(-1) == value.size(-1);
  if (context.userEnabledFlashSDP() && half && plain && !mask.has_value() && same_width && query.size(-1) <= 256) return 1;
  bool heads = query.size(1) == key.size(1);
  bool masked_by_a_leaf = mask.has_value() && mask->requires_grad();
  int64_t step = half ? 8 : 4;
  if (context.userEnabledMemEfficientSDP() && (half || type == at::kFloat) && plain && heads && !masked_by_a_leaf &&
      query.size(-1) % step == 0 && value.size(-1) % step == 0)
    return 2;
  return 0;
}

TORCH_LIBRARY(simulated, m) {
  m.def("as_host(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(simulated, CUDA, m) {
  m.impl("as_host", &as_host);
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_nothing);
  m.impl("resize_", &resize);
}

}  // namespace

extern "C" {

// Before any backward: autograd makes its threads once. `import torch` has made the hooks object already: it has no
// data, and is given our table of functions.
int install() {
  auto& known = impl::device_guard_impl_registry[static_cast<size_t>(CUDA)];
  if (known.load() != nullptr) return 0;
  known.store(new Guard());
  SetAllocator(CUDA, &allocator);
  static Hooks hooks;
  auto* made = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(made) = *reinterpret_cast<void**>(static_cast<at::CUDAHooksInterface*>(&hooks));
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return at::detail::getCUDAHooks().isBuilt();
}
void set_poison(int on) { poisons = on; }
int current_device() { return current; }
void set_device(int i) { current = i; }
int64_t current_stream(int i) { return streams[i]; }
void set_stream(int i, int64_t id) { streams[i] = id; }
void set_pool(int64_t id) { pool = id; }
int64_t allocated_bytes(int i) { return memory[i].allocated; }
int64_t peak_bytes(int i) { return memory[i].peak; }
void reset_peak(int i) { memory[i].peak = memory[i].allocated; }
// From the address to the end of the live block that it lies in, and its device; -1: in none. pooled: or of an idle one
// in the pool of a graph, which no one else is given.
int64_t room_at(int64_t address, int pooled, int* device) {
  int i = *device = device_of_address(reinterpret_cast<void*>(address));
  if (i < 0) return -1;
  std::lock_guard<std::mutex> guard(lock);
  size_t offset = reinterpret_cast<char*>(address) - memory[i].base;
  auto next = memory[i].live.upper_bound(offset);
  if (next != memory[i].live.begin()) {
    auto block = std::prev(next);
    size_t end = block->first + block->second.size;
    if (offset < end) return end - offset;
  }
  if (pooled)
    for (auto& [owner, blocks] : memory[i].idle)
      for (auto& [start, size] : blocks)
        if (owner > 0 && start <= offset && offset < start + size) return start + size - offset;
  return -1;
}
}
