#include "lanes/receiver_input.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvxfer {
namespace {

constexpr std::size_t kCacheLine = 64;
// Below this much room at the end, what is left moves to the front: a recv should never be a sliver.
constexpr std::size_t kLeastRoom = ReceiverInput::kBufferBytes / 2;

}  // namespace

ReceiverInput::ReceiverInput(int socket, int wake, const std::atomic<bool>& stop)
    : socket_(socket),
      wake_(wake),
      stop_(stop),
      storage_(std::make_unique<std::uint8_t[]>(kBufferBytes + kCacheLine)),
      buffer_(storage_.get() + (kCacheLine - reinterpret_cast<std::uintptr_t>(storage_.get()) % kCacheLine)) {}

ReceiverInput::Status ReceiverInput::more() {
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (kBufferBytes - end_ < kLeastRoom) {
    std::memmove(buffer_, buffer_ + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  while (true) {
    if (stopped()) return Status::kStopped;
    const ssize_t got = recv(socket_, buffer_ + end_, kBufferBytes - end_, MSG_DONTWAIT);
    if (got > 0) {
      end_ += static_cast<std::size_t>(got);
      return Status::kOk;
    }
    if (got == 0) return Status::kEof;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const Status waited = wait(POLLIN, -1);
      if (waited != Status::kOk) return waited;
    } else if (errno != EINTR) {
      return fail("recv", errno);
    }
  }
}

ReceiverInput::Status ReceiverInput::read(void* to, std::size_t n) {
  auto* at = static_cast<std::uint8_t*>(to);
  while (true) {
    const std::size_t take = std::min(n, end_ - begin_);
    if (take > 0) std::memcpy(at, buffer_ + begin_, take);
    consume(take);
    at += take;
    n -= take;
    if (n == 0) return Status::kOk;
    const Status status = more();
    if (status != Status::kOk) return status;
  }
}

ReceiverInput::Status ReceiverInput::skip(std::uint64_t n) {
  while (true) {
    const std::size_t take = static_cast<std::size_t>(std::min<std::uint64_t>(n, end_ - begin_));
    consume(take);
    n -= take;
    if (n == 0) return Status::kOk;
    const Status status = more();
    if (status != Status::kOk) return status;
  }
}

ReceiverInput::Status ReceiverInput::send(const void* data, std::size_t n, int timeout_ms) {
  const auto* at = static_cast<const std::uint8_t*>(data);
  while (n > 0) {
    if (stopped()) return Status::kStopped;
    const ssize_t r = ::send(socket_, at, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (r >= 0) {
      at += r;
      n -= static_cast<std::size_t>(r);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const Status waited = wait(POLLOUT, timeout_ms);
      if (waited != Status::kOk) return waited;
    } else if (errno != EINTR) {
      return fail("send", errno);
    }
  }
  return Status::kOk;
}

ReceiverInput::Status ReceiverInput::wait(short events, int timeout_ms) {
  while (true) {
    if (stopped()) return Status::kStopped;
    pollfd fds[2] = {{socket_, events, 0}, {wake_, POLLIN, 0}};
    const int ready = poll(fds, 2, timeout_ms);
    if (ready == 0) return fail("send", ETIMEDOUT);
    if (ready < 0 && errno != EINTR) return fail("poll", errno);
    if (ready > 0 && fds[0].revents != 0) return Status::kOk;
  }
}

ReceiverInput::Status ReceiverInput::fail(const char* call, int error) {
  error_ = std::string(call) + ": " + std::strerror(error);
  return Status::kFailed;
}

}  // namespace kvxfer
