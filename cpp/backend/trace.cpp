// SPDX-License-Identifier: Apache-2.0
// TraceBackend, and the text form of its log.
//
// Concurrency: counters are atomics. The log can be replayed in its order, whichever threads the calls came from:
//   * A call that makes or changes something is logged after it has returned, but before its caller has the result. So
//     whatever uses a handle or an address stands behind what made it.
//   * A call that gives something back is logged before it is made (and marked if it fails). So whatever gets the same
//     memory, address or handle again, on another thread and before the first call has returned, stands behind it.
#include <atomic>
#include <mutex>
#include <new>
#include <sstream>

#include "backend/intercept.h"
#include "remap/decorators.h"

namespace remap {
namespace {

constexpr std::array<std::size_t, kCallKinds> kArguments = {
    2, 2, 2, 1, 1, 3, 2, 3, 3, 2,  // reserve release retire create_page destroy_page map unmap set_access exchange populate
    1, 2, 3, 2, 3,              // allocate_host free_host register_host unregister_host use_host
    0, 1, 1, 1, 4, 2, 4,        // create_stream destroy_stream adopt_stream forget_stream copy copy_batch fill
    1, 1, 2, 2, 1, 2, 2,        // create_event destroy_event record stream_wait query synchronize elapsed
};

// The part of a call that stands behind its arguments: a word, and `numbers` numbers for each that args[1] counts.
struct Listed {
  const char* word = nullptr;
  std::size_t numbers = 0;
};
Listed listed(Call call) noexcept {
  if (call == Call::map) return {"pages", 1};
  if (call == Call::copy_batch) return {"ranges", 3};
  return {};
}

bool gives_back(Call call) noexcept {
  switch (call) {
    case Call::release:
    case Call::destroy_page:
    case Call::unmap:
    case Call::free_host:
    case Call::unregister_host:
    case Call::destroy_stream:
    case Call::destroy_event: return true;
    default: return false;
  }
}

std::size_t index(Call call) noexcept { return static_cast<std::size_t>(call); }

class Trace final : public Intercept<TraceBackend> {
 public:
  using Intercept<TraceBackend>::Intercept;

  std::uint64_t count(Call call) const noexcept override { return counts_[index(call)].load(std::memory_order_relaxed); }
  std::uint64_t failed(Call call) const noexcept override { return failed_[index(call)].load(std::memory_order_relaxed); }
  std::uint64_t count() const noexcept override {
    std::uint64_t sum = 0;
    for (const auto& one : counts_) sum += one.load(std::memory_order_relaxed);
    return sum;
  }
  void set_logging(bool on) noexcept override { logging_.store(on, std::memory_order_relaxed); }
  std::vector<TraceRecord> log() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return log_;
  }
  void clear_log() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    cleared_ += log_.size();
    log_.clear();
  }

 protected:
  std::uint64_t before(Call call, const CallArguments& arguments) override {
    counts_[index(call)].fetch_add(1, std::memory_order_relaxed);
    return gives_back(call) ? append(call, false, 0, arguments, nullptr, 0) : 0;
  }

  void after(std::uint64_t token, Call call, bool failed, std::uint64_t result, const CallArguments& arguments,
             const std::uint64_t* list, std::size_t count) noexcept override {
    if (failed) failed_[index(call)].fetch_add(1, std::memory_order_relaxed);
    if (!gives_back(call)) {
      (void)append(call, failed, result, arguments, list, count);
    } else if (failed && token != 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (token > cleared_) log_[token - cleared_ - 1].failed = true;
    }
  }

 private:
  // The record's number, from 1 and never reused; 0 if it was not logged.
  std::uint64_t append(Call call, bool failed, std::uint64_t result, const CallArguments& arguments, const std::uint64_t* list,
                       std::size_t count) noexcept {
    if (!logging_.load(std::memory_order_relaxed)) return 0;
    try {
      TraceRecord record;
      record.call = call;
      record.failed = failed;
      record.result = result;
      record.args = arguments;
      record.list.assign(list, list + count);
      const std::lock_guard<std::mutex> lock(mutex_);
      log_.push_back(std::move(record));
      return cleared_ + log_.size();
    } catch (const std::bad_alloc&) {
      // The call may have had its effect and must not throw now; a log with a gap is worth nothing, so it ends here.
      logging_.store(false, std::memory_order_relaxed);
      return 0;
    }
  }

  std::array<std::atomic<std::uint64_t>, kCallKinds> counts_{};
  std::array<std::atomic<std::uint64_t>, kCallKinds> failed_{};
  std::atomic<bool> logging_{true};
  mutable std::mutex mutex_;
  std::vector<TraceRecord> log_;  // guarded by mutex_
  std::uint64_t cleared_ = 0;     // guarded by mutex_: records that were logged and cleared
};

[[noreturn]] void refuse_line(std::size_t line, const std::string& text, const char* expected) {
  throw Error(ErrorKind::invalid_argument,
              "trace line " + std::to_string(line) + ": expected " + expected + ", got '" + text.substr(0, 80) + "'",
              {{"line", static_cast<std::int64_t>(line)}});
}

std::uint64_t parse_number(const std::string& word, std::size_t line, const std::string& text) {
  std::uint64_t value = 0;
  if (word.empty()) refuse_line(line, text, "a number");
  for (const char digit : word) {
    const auto add = static_cast<std::uint64_t>(digit - '0');
    if (digit < '0' || digit > '9' || value > (~std::uint64_t{0} - add) / 10) refuse_line(line, text, "a number");
    value = value * 10 + add;
  }
  return value;
}

TraceRecord parse_line(const std::string& text, std::size_t line) {
  std::istringstream words(text);
  std::string word;
  TraceRecord record;
  words >> word;
  std::size_t kind = 0;
  while (kind < kCallKinds && word != call_name(static_cast<Call>(kind))) ++kind;
  if (kind == kCallKinds) refuse_line(line, text, "the name of a call");
  record.call = static_cast<Call>(kind);
  words >> word;
  if (!words || (word != "ok" && word != "failed")) refuse_line(line, text, "'ok' or 'failed' behind the name");
  record.failed = word == "failed";
  const auto next = [&] {
    std::string digits;
    words >> digits;
    return parse_number(digits, line, text);
  };
  record.result = next();
  for (std::size_t i = 0; i < kArguments[kind]; ++i) {
    // Older traces do not name the use of registered memory, which is HostUse::locked then.
    if (record.call == Call::register_host && i == 2 && (words >> std::ws).eof()) break;
    record.args[i] = next();
  }
  if (const Listed list = listed(record.call); list.word != nullptr) {
    if (!(words >> word) || word != list.word) refuse_line(line, text, "'pages' behind a map, 'ranges' behind a copy_batch");
    while (words >> word) record.list.push_back(parse_number(word, line, text));
    if (record.list.size() % list.numbers != 0 || record.list.size() / list.numbers != record.args[1]) {
      refuse_line(line, text, "as many pages or ranges as the count says");
    }
  } else if (words >> word) {
    refuse_line(line, text, "nothing behind the arguments");
  }
  return record;
}

}  // namespace

std::shared_ptr<TraceBackend> make_trace_backend(std::shared_ptr<Backend> inner) {
  return std::make_shared<Trace>(std::move(inner));
}

std::string serialize(const std::vector<TraceRecord>& log) {
  std::string text;
  for (const TraceRecord& record : log) {
    text += call_name(record.call);
    text += record.failed ? " failed " : " ok ";
    text += std::to_string(record.result);
    for (std::size_t i = 0; i < kArguments[index(record.call)]; ++i) text += " " + std::to_string(record.args[i]);
    if (const Listed list = listed(record.call); list.word != nullptr) {
      text += std::string(" ") + list.word;
      for (const std::uint64_t each : record.list) text += " " + std::to_string(each);
    }
    text += "\n";
  }
  return text;
}

std::vector<TraceRecord> parse_trace(const std::string& text) {
  std::vector<TraceRecord> log;
  std::istringstream lines(text);
  std::string line;
  for (std::size_t number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos || line[0] == '#') continue;
    log.push_back(parse_line(line, number));
  }
  return log;
}

}  // namespace remap
