// Current devices and streams, events, and the copies that come late.

#include "simulated.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <map>
#include <mutex>
#include <vector>

namespace simulated {
namespace {

using Clock = std::chrono::steady_clock;

struct Copy {
  bool upload;
  at::Tensor target, source; // both of the host, or the device's memory seen from it
  at::Tensor owner; // keeps the device's memory
  bool done = false;

  void run() {
    if (!done) {
      done = true;
      Access access({memory_of(target), memory_of(source)});
      target.copy_(source);
    }
  }
};

using Copies = std::vector<std::shared_ptr<Copy>>;

struct Event {
  Copies before; // copies of the stream that the event is behind
  Clock::time_point time;
  int asked = 0;
};

std::mutex lock;
auto& queues = *new std::map<std::pair<int, c10::StreamId>, Copies>; // threads may outlive the program
thread_local int device_here = 0;
thread_local c10::StreamId streams_here[DEVICES] = {};

Copies& queue(const c10::Stream& stream) { return queues[{stream.device_index(), stream.id()}]; }

void run(const Copies& copies, bool downloads) {
  std::lock_guard<std::mutex> hold(lock);
  for (auto& one : copies) {
    if (one->upload || downloads) {
      one->run();
    }
  }
}

bool are_done(const Copies& copies) {
  std::lock_guard<std::mutex> hold(lock);
  return std::all_of(copies.begin(), copies.end(), [](auto& one) { return one->done; });
}

// What is queued, taken out of the queue. Tensors die outside of the lock: Python's may wait for the interpreter's lock.
Copies taken(const c10::Stream& stream, bool downloads) {
  std::lock_guard<std::mutex> hold(lock);
  Copies found, rest;
  for (auto& one : queue(stream)) {
    (one->upload || downloads ? found : rest).push_back(std::move(one));
  }
  queue(stream) = std::move(rest);
  return found;
}

c10::Stream made_stream(c10::Device device) {
  static std::atomic<c10::StreamId> count{0};
  return c10::Stream(c10::Stream::UNSAFE, device, 1 + count++ % 64);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {TYPE, static_cast<c10::DeviceIndex>(exchange_device(device.index()))};
  }
  c10::Device getDevice() const override { return {TYPE, static_cast<c10::DeviceIndex>(device_here)}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_here = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return made_stream(device.has_index() ? device : getDevice());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return made_stream(device.has_index() ? device : getDevice());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    streams_here[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    Event made{{}, Clock::now()};
    {
      std::lock_guard<std::mutex> hold(lock);
      made.before = queue(stream);
    }
    std::swap(*static_cast<Event*>(*event), made);
  }

  void block(void* event, const c10::Stream&) const override {
    if (event != nullptr) {
      run(static_cast<Event*>(event)->before, false);
    }
  }

  // At first an event is not there yet, then it is: who asks until it is comes to an end.
  bool queryEvent(void* event) const override {
    auto* one = static_cast<Event*>(event);
    if (one == nullptr || are_done(one->before)) {
      return true;
    }
    if (one->asked++ == 0) {
      return false;
    }
    synchronizeEvent(event);
    return true;
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      run(static_cast<Event*>(event)->before, true);
      static_cast<Event*>(event)->before.clear();
    }
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(static_cast<Event*>(second)->time - static_cast<Event*>(first)->time).count();
  }

  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> hold(lock);
    return queue(stream).empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override { finish(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const auto index = static_cast<c10::DeviceIndex>(device < 0 ? device_here : device);
    std::vector<c10::StreamId> ids;
    {
      std::lock_guard<std::mutex> hold(lock);
      for (auto& [key, copies] : queues) {
        if (key.first == index) {
          ids.push_back(key.second);
        }
      }
    }
    for (auto id : ids) {
      finish(c10::Stream(c10::Stream::UNSAFE, {TYPE, index}, id));
    }
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto index = device < 0 ? static_cast<c10::DeviceIndex>(device_here) : device;
  return c10::Stream(c10::Stream::UNSAFE, {TYPE, index}, streams_here[index]);
}

int current_device() { return device_here; }

int exchange_device(int device) {
  TORCH_CHECK(device < DEVICES, "found simulated device ", device, ", expected 0 to ", DEVICES - 1);
  const int before = device_here;
  if (device >= 0) {
    device_here = device;
  }
  return before;
}

void upload_later(const c10::Stream& stream, const at::Tensor& target, const at::Tensor& source) {
  {
    // a stream copies in order: what it has to bring to this memory of the host is there before it is read
    std::lock_guard<std::mutex> hold(lock);
    for (auto& one : queue(stream)) {
      if (!one->upload && one->target.storage().data() == source.storage().data()) {
        one->run();
      }
    }
  }
  auto made = std::make_shared<Copy>(Copy{true, on_host(target), source, target});
  {
    Access access({memory_of(made->target)});
    spoil(made->target);
  }
  std::lock_guard<std::mutex> hold(lock);
  queue(stream).push_back(std::move(made));
}

void download_later(const c10::Stream& stream, const at::Tensor& target, const at::Tensor& source) {
  Access access({memory_of(source)});
  auto made = std::make_shared<Copy>(Copy{false, target, on_host(source).clone(), source});
  spoil(target);
  std::lock_guard<std::mutex> hold(lock);
  queue(stream).push_back(std::move(made));
}

void finish_uploads(const c10::Stream& stream) { run(taken(stream, false), false); }

void finish(const c10::Stream& stream) { run(taken(stream, true), true); }

} // namespace simulated
