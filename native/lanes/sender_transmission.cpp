#include "lanes/sender_transmission.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvxfer {
namespace {

// Below this an iovec entry costs more than the copy.
constexpr std::uint64_t kShortRun = 2048;
constexpr std::size_t kStagingBytes = 256 * 1024;
// What one sendmsg may take: an abort waits for no more than this.
constexpr std::size_t kCallBytes = 512 * 1024;
constexpr std::size_t kZeroBytes = 64 * 1024;
alignas(64) const std::uint8_t kZeros[kZeroBytes] = {};

iovec piece(const void* data, std::size_t n) { return {const_cast<void*>(data), n}; }

}  // namespace

std::vector<std::uint8_t>& Transmission::begin() {
  busy_ = true;
  head_.clear();
  head_sent_ = 0;
  source_left_ = 0;
  zeros_ = false;
  staged_ = staging_sent_ = 0;
  return head_;
}

void Transmission::add_chunks(const SliceSource& source, const std::uint64_t* pages, std::uint32_t n_pages) {
  source_ = source;
  pages_ = pages;
  n_pages_ = n_pages;
  cursor_ = {};
  source_left_ = source.chunk_bytes() * n_pages;
  if (source.run_bytes < kShortRun && staging_.empty()) staging_.resize(kStagingBytes);
}

void Transmission::zero_rest() noexcept {
  zeros_ = true;
  staged_ = staging_sent_ = 0;
}

const std::uint8_t* Transmission::at(const Cursor& cursor, std::size_t& left) const noexcept {
  left = source_.run_bytes - cursor.offset;
  return source_.chunk(pages_[cursor.page]) + cursor.run * source_.stride + cursor.offset;
}

void Transmission::advance(Cursor& cursor, std::size_t n) const noexcept {
  while (n > 0) {
    const std::size_t step = std::min<std::size_t>(n, source_.run_bytes - cursor.offset);
    cursor.offset += step;
    n -= step;
    if (cursor.offset < source_.run_bytes) return;
    cursor.offset = 0;
    if (++cursor.run < source_.runs) continue;
    cursor.run = 0;
    ++cursor.page;
  }
}

std::size_t Transmission::fill_pieces(iovec* pieces, std::size_t max_pieces, std::size_t max_bytes) const noexcept {
  Cursor cursor = cursor_;
  std::size_t n = 0, total = 0;
  while (cursor.page < n_pages_ && total < max_bytes) {
    std::size_t left = 0;
    const std::uint8_t* data = at(cursor, left);
    left = std::min(left, max_bytes - total);
    if (n > 0 && static_cast<std::uint8_t*>(pieces[n - 1].iov_base) + pieces[n - 1].iov_len == data) {
      pieces[n - 1].iov_len += left;
    } else if (n == max_pieces) {
      break;
    } else {
      pieces[n++] = piece(data, left);
    }
    total += left;
    advance(cursor, left);
  }
  return n;
}

void Transmission::stage() {
  const std::size_t want = std::min<std::uint64_t>(source_left_, staging_.size());
  staged_ = staging_sent_ = 0;
  while (staged_ < want) {
    std::size_t left = 0;
    const std::uint8_t* data = at(cursor_, left);
    left = std::min(left, want - staged_);
    std::memcpy(staging_.data() + staged_, data, left);
    staged_ += left;
    advance(cursor_, left);
  }
}

std::size_t Transmission::gather(iovec* pieces, std::size_t max_bytes) {
  std::size_t n = 0;
  if (head_sent_ < head_.size()) {
    pieces[n++] = piece(head_.data() + head_sent_, head_.size() - head_sent_);
  }
  if (source_left_ == 0) return n;
  if (zeros_) {
    for (std::uint64_t left = source_left_; left > 0 && n < 8;) {
      const std::size_t take = std::min<std::uint64_t>(left, kZeroBytes);
      pieces[n++] = piece(kZeros, take);
      left -= take;
    }
  } else if (source_.run_bytes < kShortRun) {
    if (staging_sent_ == staged_) stage();
    pieces[n++] = piece(staging_.data() + staging_sent_, staged_ - staging_sent_);
  } else {
    n += fill_pieces(pieces + n, kMaxPieces - n, max_bytes);
  }
  return n;
}

void Transmission::consume(std::size_t n) noexcept {
  const std::size_t of_head = std::min(n, head_.size() - head_sent_);
  head_sent_ += of_head;
  n -= of_head;
  source_left_ -= n;
  if (zeros_) return;
  if (staged_ > 0) {
    staging_sent_ += n;
  } else {
    advance(cursor_, n);
  }
}

Transmission::Sent Transmission::send(int fd, std::size_t max_bytes) {
  iovec pieces[kMaxPieces];
  last_sent_ = 0;
  while (last_sent_ < max_bytes) {
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = gather(pieces, std::min(kCallBytes, max_bytes - last_sent_));
    const ssize_t n = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? Sent::kBlocked : Sent::kFailed;
    }
    consume(static_cast<std::size_t>(n));
    last_sent_ += static_cast<std::size_t>(n);
    if (head_sent_ == head_.size() && source_left_ == 0) {
      busy_ = false;
      return Sent::kAll;
    }
  }
  return Sent::kBlocked;
}

}  // namespace kvxfer
