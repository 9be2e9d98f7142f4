// A lane's socket, read through one buffer that stays in the L2 cache. Belongs to the lane's thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace kvxfer {

class ReceiverInput {
 public:
  enum class Status {
    kOk,
    kStopped,  // the lane was told to end
    kEof,
    kFailed,  // error() says why
  };
  static constexpr std::size_t kBufferBytes = 256u << 10;

  // Neither descriptor is owned. `wake` becomes readable when `stop` is set.
  ReceiverInput(int socket, int wake, const std::atomic<bool>& stop);

  std::span<const std::uint8_t> buffered() const noexcept { return {buffer_ + begin_, end_ - begin_}; }
  void consume(std::size_t n) noexcept { begin_ += n; }
  // Waits until there is more in the buffer than there was.
  Status more();
  // Waits for exactly n bytes and takes them.
  Status read(void* to, std::size_t n);
  // Takes n bytes and forgets them.
  Status skip(std::uint64_t n);
  // Sends all of it; gives up (kFailed) when the peer takes nothing for timeout_ms.
  Status send(const void* data, std::size_t n, int timeout_ms);

  bool stopped() const noexcept { return stop_.load(std::memory_order_acquire); }
  const std::string& error() const noexcept { return error_; }

 private:
  Status wait(short events, int timeout_ms);  // negative: without end
  Status fail(const char* call, int error);

  const int socket_;
  const int wake_;
  const std::atomic<bool>& stop_;
  std::unique_ptr<std::uint8_t[]> storage_;
  std::uint8_t* buffer_;  // storage_, aligned to a cache line
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::string error_;
};

}  // namespace kvxfer
