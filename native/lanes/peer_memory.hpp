// Prefill's pool as decode's copiers read it: sealed memfds mapped read-only, or process_vm_readv.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lanes/receiver_fd.hpp"

namespace kvxfer {

class PeerMemory {
 public:
  // A region as the peer describes it. fd < 0: `at` is an address in the peer; else an offset in fds[fd].
  struct RegionClaim {
    int fd;
    std::uint64_t at;
    std::uint64_t page_stride;
    std::uint64_t page_bytes;
    std::uint64_t n_pages;
  };
  struct Region {
    const std::uint8_t* mapped;  // nullptr: read with process_vm_readv
    std::uint64_t address;       // of the first page, here if mapped, else in the peer
    std::uint64_t page_stride;
    std::uint64_t page_bytes;
    std::uint64_t n_pages;
  };

  // Descriptors are duplicated. Throws Error for a memfd that is not sealed against shrinking or is shorter than
  // claimed, for regions that wrap, and, where any region has no fd, for a probe that does not read back equal;
  // std::system_error for failed calls.
  PeerMemory(pid_t pid, int pidfd, const std::vector<std::vector<RegionClaim>>& regions, std::span<const int> fds,
             int table_fd, std::uint64_t probe_ptr, std::string_view probe);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // nullptr where the peer has no such region.
  const Region* region(std::uint32_t group, std::uint32_t index) const noexcept {
    if (group >= regions_.size() || index >= regions_[group].size()) return nullptr;
    return &regions_[group][index];
  }
  // True where the slot holds `expected` and the peer lives: what was read before this call was pinned while it was
  // read. `why` says what is wrong otherwise.
  bool source_intact(std::uint64_t slot, std::uint64_t expected, std::string& why) const;
  // Gathers the runs into `to`, which holds `bytes`, the sum of their lengths. False, and `why`, where that failed.
  bool read(std::span<const iovec> runs, std::uint8_t* to, std::size_t bytes, std::string& why) const;
  const char* how() const noexcept;

 private:
  class Mapping {
   public:
    Mapping(int fd, const std::string& name);  // maps the whole sealed memfd read-only
    ~Mapping();
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&&) = delete;
    const std::uint8_t* base = nullptr;
    std::uint64_t bytes = 0;
  };

  pid_t pid_;
  OwnedFd pidfd_;
  Mapping table_;
  std::vector<Mapping> mappings_;
  std::vector<std::vector<Region>> regions_;
  bool any_mapped_ = false;
  bool any_remote_ = false;
};

}  // namespace kvxfer
