// A memfd of fixed size, mapped read-write, that peers on this host may map: sealed, so that it can neither shrink
// under a reader (SIGBUS) nor grow. Immutable after construction; the bytes are the user's to synchronise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvxfer {

class SharedMemory {
 public:
  // Zero-filled. nbytes is rounded up to whole huge pages if huge_pages. Throws std::system_error, and
  // std::invalid_argument for nbytes 0.
  SharedMemory(std::size_t nbytes, const std::string& name, bool huge_pages = false);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::uint8_t* data() const noexcept { return data_; }
  std::size_t nbytes() const noexcept { return nbytes_; }
  int fd() const noexcept { return fd_; }  // close-on-exec; -1 once closed
  // Unmaps and closes. Peers' own mappings live on. Idempotent; not safe against concurrent use of the bytes.
  void close() noexcept;

 private:
  int fd_ = -1;
  std::uint8_t* data_ = nullptr;
  std::size_t nbytes_ = 0;
};

// True if the fd is a memfd that can no longer shrink: whoever maps it can rely on its present size.
bool sealed_against_shrinking(int fd) noexcept;

}  // namespace kvxfer
