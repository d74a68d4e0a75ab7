// A simulated accelerator on torch's device key PrivateUse1: two devices in memory of the host, which the host can't read.
//
// Operators are those of the CPU and are done at once. Copies that a program does not wait for are done late: their target
// holds NaN until somebody waits. So what works here waits for what it needs; how fast it is, this can't show.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

namespace simulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr size_t MEMORY = size_t(4) << 30; // bytes of each device

// memory.cpp

struct Part {
  const void* start;
  size_t bytes;
};

Part memory_of(const at::Tensor& tensor); // all of its storage

// Opens these parts of the devices' memory, and leaves the host's alone. They are closed when nobody has access to any:
// then each use of them ends the process.
struct Access {
  explicit Access(std::initializer_list<Part> parts);
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};

c10::Allocator* allocator();
c10::Device device_of(const void* pointer); // raises for memory of the host
bool is_pinned(const void* pointer);
at::Tensor on_host(const at::Tensor& tensor); // the same memory as a tensor of the CPU; to be used under Access
void spoil(const at::Tensor& tensor); // fill it with NaN; under Access

// streams.cpp

c10::Stream current_stream(c10::DeviceIndex device);
int current_device();
int exchange_device(int device);

// A copy for which the program does not wait. An upload is done before the stream's next operator, a download when somebody waits
// for it: its source is read now.
void upload_later(const c10::Stream& stream, const at::Tensor& target, const at::Tensor& source);
void download_later(const c10::Stream& stream, const at::Tensor& target, const at::Tensor& source);
void finish_uploads(const c10::Stream& stream);
void finish(const c10::Stream& stream);

// operators.cpp

const at::Generator& generator_of(c10::DeviceIndex device); // -1: of the current one
at::Generator new_generator(c10::DeviceIndex device);

} // namespace simulated
