// Where the core's threads leave what happened, and one eventfd that says so. Any thread may push, any may drain.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace kvxfer {

enum class Kind : std::uint8_t { kLaneUp = 1, kLaneDown, kRecord, kViolation, kLegDrained, kLegFailed };

struct Completion {
  Kind kind;
  std::uint32_t session = 0;
  std::uint32_t generation = 0;
  std::int32_t lane = -1;
  std::uint64_t reservation = 0;
  std::uint32_t leg = 0;
  std::string data;
};

class CompletionQueue {
 public:
  CompletionQueue();  // throws std::system_error
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  int fileno() const noexcept { return event_fd_; }
  void push(Completion completion);
  std::vector<Completion> drain();

 private:
  int event_fd_;
  std::mutex mutex_;
  std::vector<Completion> pending_;
};

}  // namespace kvxfer
