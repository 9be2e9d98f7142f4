// One frame on its way out: bytes of our own, then, on tcp, chunks straight from the source pages. Never blocks. Used
// by one thread at a time.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lanes/leg_out.hpp"
#include "lanes/wire.hpp"

namespace kvxfer {

class Transmission {
 public:
  enum class Sent : std::uint8_t { kAll, kBlocked, kFailed };

  bool busy() const noexcept { return busy_; }
  // Begins an empty frame. `head` is reused from frame to frame; the caller appends its header first.
  std::vector<std::uint8_t>& begin();
  // The frame continues with n_pages chunks of the source, which must stay readable until all are sent or zero_rest().
  void add_chunks(const SliceSource& source, const std::uint64_t* pages, std::uint32_t n_pages);
  // No source byte is read from here on: what the frame still lacks of them goes out as zeros.
  void zero_rest() noexcept;
  // Sends until the frame is out, the socket is full or about max_bytes have gone. kBlocked covers the latter two;
  // kFailed leaves errno.
  Sent send(int fd, std::size_t max_bytes);
  // What the last send() got rid of.
  std::size_t last_sent() const noexcept { return last_sent_; }

 private:
  static constexpr std::size_t kMaxPieces = 64;

  struct Cursor {
    std::uint32_t page = 0;
    std::uint64_t run = 0;
    std::uint64_t offset = 0;  // inside the run
  };

  const std::uint8_t* at(const Cursor& cursor, std::size_t& left) const noexcept;
  void advance(Cursor& cursor, std::size_t n) const noexcept;
  std::size_t fill_pieces(iovec* pieces, std::size_t max_pieces, std::size_t max_bytes) const noexcept;
  void stage();
  std::size_t gather(iovec* pieces, std::size_t max_bytes);
  void consume(std::size_t n) noexcept;

  bool busy_ = false;
  std::vector<std::uint8_t> head_;
  std::size_t head_sent_ = 0;
  std::uint64_t source_left_ = 0;  // bytes of chunks not yet sent
  bool zeros_ = false;
  SliceSource source_;
  const std::uint64_t* pages_ = nullptr;
  std::uint32_t n_pages_ = 0;
  Cursor cursor_;
  // Short runs are gathered here first: one system call for many.
  std::vector<std::uint8_t> staging_;
  std::size_t staged_ = 0;
  std::size_t staging_sent_ = 0;
  std::size_t last_sent_ = 0;
};

}  // namespace kvxfer
