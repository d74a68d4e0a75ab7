// The devices' memory, pinned memory of the host, and their allocators.

#include "simulated.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace simulated {
namespace {

constexpr size_t UNIT = 512; // bytes: each block begins at a multiple of it
constexpr size_t PAGE = 4096;
std::mutex opening;
int open_for = 0; // who may use memory now
auto& opened = *new std::vector<std::pair<char*, size_t>>; // what may be used now; threads may outlive the program

char* arena() {
  static char* const start = [] {
    void* found = mmap(nullptr, DEVICES * MEMORY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "the simulated devices got no memory");
    return static_cast<char*>(found);
  }();
  return start;
}

void protect(std::pair<char*, size_t> pages, int how) {
  if (mprotect(pages.first, pages.second, how) != 0) {
    std::perror("the simulated devices' memory");
    std::abort();
  }
}

// First fit over a map of free blocks: blocks that touch become one.
struct Space {
  std::map<size_t, size_t> unused{{0, MEMORY}}; // offset -> bytes

  std::optional<size_t> take(size_t bytes) {
    for (auto [offset, size] : unused) {
      if (size >= bytes) {
        unused.erase(offset);
        if (size > bytes) {
          unused[offset + bytes] = size - bytes;
        }
        return offset;
      }
    }
    return std::nullopt;
  }

  void give(size_t offset, size_t bytes) {
    auto next = unused.lower_bound(offset);
    if (next != unused.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = unused.erase(next);
    }
    if (next != unused.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    unused[offset] = bytes;
  }
};

void release(void* pointer);

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device place(TYPE, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) {
      return {nullptr, nullptr, &release, place};
    }
    const size_t rounded = (bytes + UNIT - 1) / UNIT * UNIT;
    char* start = nullptr;
    {
      std::lock_guard<std::mutex> hold(lock);
      const auto offset = spaces[device].take(rounded);
      TORCH_CHECK_WITH(
          OutOfMemoryError, offset.has_value(), "simulated device out of memory. Tried to allocate ", bytes, " bytes");
      start = arena() + device * MEMORY + *offset;
      sizes[start] = rounded;
      stats[device].allocated_bytes[0].increase(bytes);
      stats[device].reserved_bytes[0].increase(rounded);
      asked[start] = bytes;
    }
    Access access({{start, rounded}});
    std::memset(start, 0xFF, rounded); // NaN, for who reads before anybody has written
    return {start, start, &release, place};
  }

  void free(void* pointer) {
    std::lock_guard<std::mutex> hold(lock);
    const int device = static_cast<char*>(pointer) >= arena() + MEMORY;
    const size_t bytes = sizes.at(pointer);
    spaces[device].give(static_cast<char*>(pointer) - arena() - device * MEMORY, bytes);
    stats[device].allocated_bytes[0].decrease(asked.at(pointer));
    stats[device].reserved_bytes[0].decrease(bytes);
    sizes.erase(pointer);
    asked.erase(pointer);
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    Access access({{target, bytes}, {source, bytes}});
    std::memcpy(target, source, bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex device) override { stats[device].allocated_bytes[0].reset_accumulated(); }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(lock);
    return stats[device];
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(lock);
    stats[device].allocated_bytes[0].reset_peak();
    stats[device].reserved_bytes[0].reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(lock);
    return {MEMORY - stats[device].reserved_bytes[0].current, MEMORY};
  }

  std::mutex lock;
  Space spaces[DEVICES];
  std::map<void*, size_t> sizes, asked;
  c10::CachingDeviceAllocator::DeviceStats stats[DEVICES];
};

DeviceMemory& device_memory() {
  static auto* const made = new DeviceMemory; // tensors of other threads may outlive everything
  return *made;
}

void release(void* pointer) {
  if (pointer != nullptr) {
    device_memory().free(pointer);
  }
}

void unpin(void* pointer);

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = std::aligned_alloc(UNIT, std::max(UNIT, (bytes + UNIT - 1) / UNIT * UNIT));
    TORCH_CHECK(start != nullptr, "no memory on the host");
    std::lock_guard<std::mutex> hold(lock);
    blocks[static_cast<char*>(start)] = std::max<size_t>(bytes, 1);
    return {start, start, &unpin, c10::DeviceType::CPU};
  }

  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> hold(lock);
    auto next = blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    return next != blocks.begin() && static_cast<const char*>(pointer) < std::prev(next)->first + std::prev(next)->second;
  }

  void forget(void* pointer) {
    std::lock_guard<std::mutex> hold(lock);
    blocks.erase(static_cast<char*>(pointer));
    std::free(pointer);
  }

  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  std::mutex lock;
  std::map<char*, size_t> blocks;
};

PinnedMemory& pinned_memory() {
  static auto* const made = new PinnedMemory;
  return *made;
}

void unpin(void* pointer) { pinned_memory().forget(pointer); }

const bool registered = [] {
  c10::SetAllocator(TYPE, &device_memory());
  at::setHostAllocator(TYPE, &pinned_memory());
  return true;
}();

} // namespace

Access::Access(std::initializer_list<Part> parts) {
  std::lock_guard<std::mutex> hold(opening);
  ++open_for;
  for (const auto& part : parts) {
    const auto offset = static_cast<const char*>(part.start) - arena();
    if (part.bytes == 0 || offset < 0 || size_t(offset) >= DEVICES * MEMORY) {
      continue; // the host's
    }
    const size_t first = offset / PAGE * PAGE, end = (offset + part.bytes + PAGE - 1) / PAGE * PAGE;
    opened.emplace_back(arena() + first, end - first);
    protect(opened.back(), PROT_READ | PROT_WRITE);
  }
}

Access::~Access() {
  std::lock_guard<std::mutex> hold(opening);
  if (--open_for == 0) {
    for (const auto& pages : opened) {
      protect(pages, PROT_NONE);
    }
    opened.clear();
  }
}

Part memory_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return {nullptr, 0};
  }
  return {tensor.storage().data(), tensor.storage().nbytes()};
}

c10::Allocator* allocator() { return &device_memory(); }

c10::Device device_of(const void* pointer) {
  const auto offset = static_cast<const char*>(pointer) - arena();
  TORCH_CHECK(0 <= offset && size_t(offset) < DEVICES * MEMORY, "this is no memory of a simulated device");
  return {TYPE, static_cast<c10::DeviceIndex>(offset / MEMORY)};
}

bool is_pinned(const void* pointer) { return pinned_memory().holds(pointer); }

at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  auto seen = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

void spoil(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) {
    std::memset(const_cast<void*>(tensor.const_data_ptr()), 0xFF, tensor.nbytes());
  } else if (tensor.is_floating_point()) {
    tensor.fill_(NAN);
  }
}

} // namespace simulated
