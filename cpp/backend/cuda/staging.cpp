// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/staging.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace remap::cuda {

StagingLane::StagingLane(const Context& context, LockedMemory& locked, host::CopyPool& filling, const char* call)
    : context_(context), driver_(context.driver()), locked_(locked), filling_(filling) {
  try {
    memory_ = locked_.allocate_slots(kSlots * kSlotBytes);
    const Context::Use use(context_, call);
    check(driver_, call, "cuStreamCreateWithPriority",
          driver_.cuStreamCreateWithPriority(&stream_, kStreamNonBlocking, kDefaultPriority));
    for (Slot& slot : slots_) {
      for (EventPointer* event : {&slot.filled, &slot.emptied}) {
        check(driver_, call, "cuEventCreate", driver_.cuEventCreate(event, kEventDisableTiming));
      }
    }
  } catch (...) {
    try {
      close();
    } catch (const Error&) {
      // The first error says what happened. What is left ends with the context.
    }
    throw;
  }
}

StagingLane::~StagingLane() {
  try {
    close();
  } catch (const Error&) {
    // The context is lost, or the process is ending: what is left ends with it. LockedMemory gives the slots back.
  }
}

void StagingLane::close() {
  const Context::Use use(context_, "destroy_stream");
  if (stream_ != nullptr) {
    // Over when it has failed, too: host functions of a lost context never run.
    if (const Result code = driver_.cuStreamSynchronize(stream_); code != result::kSuccess) {
      if (driver_.cuStreamQuery(stream_) == result::kNotReady) fail(driver_, "destroy_stream", "cuStreamSynchronize", code);
    }
    settle();
    check(driver_, "destroy_stream", "cuStreamDestroy", driver_.cuStreamDestroy(stream_));
    stream_ = nullptr;
  }
  for (Slot& slot : slots_) {
    for (EventPointer* event : {&slot.filled, &slot.emptied}) {
      if (*event == nullptr) continue;
      check(driver_, "destroy_stream", "cuEventDestroy", driver_.cuEventDestroy(*event));
      *event = nullptr;
    }
  }
  if (memory_ != nullptr) {
    locked_.free(memory_, kSlots * kSlotBytes);
    memory_ = nullptr;
  }
}

void StagingLane::Job::run(void* data) {
  auto* job = static_cast<Job*>(data);
  State expected = State::waiting;
  if (!job->state.compare_exchange_strong(expected, State::running, std::memory_order_acq_rel)) return;
  job->filling->copy(job->to, job->from, job->bytes);
  job->state.store(State::done, std::memory_order_release);
}

void StagingLane::settle() {
  // Jobs that the driver may call yet, kept to the end of the process.
  static std::mutex mutex;
  static auto& taken = *new std::vector<std::unique_ptr<Job>>;
  for (std::unique_ptr<Job>& job : jobs_) {
    Job::State expected = Job::State::waiting;
    if (job->state.compare_exchange_strong(expected, Job::State::taken, std::memory_order_acq_rel)) {
      const std::lock_guard<std::mutex> lock(mutex);
      taken.push_back(std::move(job));
      continue;
    }
    while (job->state.load(std::memory_order_acquire) != Job::State::done) std::this_thread::yield();
  }
  jobs_.clear();
}

Result StagingLane::copy(StreamPointer owner, std::byte* to, const std::byte* from, std::size_t bytes, const char** entry) {
  while (!jobs_.empty() && jobs_.front()->state.load(std::memory_order_acquire) == Job::State::done) jobs_.pop_front();
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t most = std::min(kSlotBytes, locked_.piece_at(slot()));  // no copy may lie in two pieces
    const std::size_t some = std::min(bytes - done, most);
    const Result code = enqueue(owner, to + done, from + done, some, entry);
    if (code != result::kSuccess) {
      (void)driver_.cuStreamSynchronize(stream_);
      settle();
      return code;
    }
    done += some;
  }
  return result::kSuccess;
}

Result StagingLane::enqueue(StreamPointer owner, std::byte* to, const std::byte* from, std::size_t bytes, const char** entry) {
  Slot& events = slots_[next_ % kSlots];
  std::byte* const at = slot();
  const auto device = static_cast<DevicePointer>(reinterpret_cast<std::uintptr_t>(to));
  auto made = std::make_unique<Job>();
  made->to = at;
  made->from = from;
  made->bytes = bytes;
  made->filling = &filling_;
  jobs_.push_back(std::move(made));
  Result code = result::kSuccess;
  const auto call = [&](const char* name, Result result) {
    *entry = name;
    code = result;
    return code == result::kSuccess;
  };
  // `emptied` that was never recorded is complete, and so is the slot's last copy once the owner has been there.
  const bool filling = call("cuStreamWaitEvent", driver_.cuStreamWaitEvent(stream_, events.emptied, 0)) &&
                       call("cuLaunchHostFunc", driver_.cuLaunchHostFunc(stream_, &Job::run, jobs_.back().get()));
  if (!filling) {
    jobs_.pop_back();  // no function of the driver's knows it
    return code;
  }
  if (!call("cuEventRecord", driver_.cuEventRecord(events.filled, stream_)) ||
      !call("cuStreamWaitEvent", driver_.cuStreamWaitEvent(owner, events.filled, 0)) ||
      !call("cuMemcpyHtoDAsync", driver_.cuMemcpyHtoDAsync(device, at, bytes, owner)) ||
      !call("cuEventRecord", driver_.cuEventRecord(events.emptied, owner))) {
    return code;
  }
  ++next_;
  return code;
}

}  // namespace remap::cuda
