// The body of a write frame on a local lane names prefill's pages; decode's core, here, copies them.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lanes/leg_in.hpp"
#include "lanes/peer_memory.hpp"
#include "lanes/receiver_placer.hpp"

namespace kvxfer {

class LocalReader {
 public:
  enum class Outcome {
    kCopied,
    kDead,     // the leg was revoked, or `stop` was set
    kRefused,  // the frame names memory that the peer does not have
    kSource,   // the source could not be read
  };

  // Belongs to one lane's thread. `source` and `stop` must outlive it.
  LocalReader(const PeerMemory& source, const std::atomic<bool>& stop);

  // Copies the plan's chunks from the peer's pages. The caller then asks the source whether they were still pinned.
  // Checks live() and `stop`, under the leg's gate, before every piece of at most kPieceBytes. `why` is set for
  // kRefused and kSource.
  Outcome copy(LegIn& leg, const WritePlan& plan, std::span<const std::uint64_t> source_pages, std::string& why);

  static constexpr std::size_t kPieceBytes = 256u << 10;

 private:
  // Where the frame's bytes lie in the peer, run by run, in the order of the chunks.
  class Cursor {
   public:
    Cursor(const PeerMemory::Region& region, const WritePlan& plan, std::span<const std::uint64_t> pages) noexcept;
    bool done() const noexcept { return index_ == pages_.size(); }
    std::uint64_t address() const noexcept;
    std::uint64_t left_in_run() const noexcept { return run_bytes_ - inside_; }
    std::uint64_t run_bytes() const noexcept { return run_bytes_; }
    bool whole_chunks() const noexcept { return runs_ == 1; }
    void advance(std::uint64_t n) noexcept;
    void prefetch_next() const noexcept;  // of mapped memory: where the next chunk begins

   private:
    const PeerMemory::Region& region_;
    const Slice& slice_;
    std::span<const std::uint64_t> pages_;
    std::uint32_t runs_;  // after merging runs that touch
    std::uint64_t run_bytes_;
    std::size_t index_ = 0;
    std::uint32_t run_ = 0;
    std::uint64_t inside_ = 0;
  };

  bool copy_mapped(LegIn& leg, ChunkPlacer& placer, Cursor& cursor);
  Outcome copy_gathered(LegIn& leg, ChunkPlacer& placer, Cursor& cursor, bool mapped, std::string& why);
  bool go_on(const LegIn& leg) const noexcept { return leg.live() && !stop_.load(std::memory_order_acquire); }

  const PeerMemory& source_;
  const std::atomic<bool>& stop_;
  std::unique_ptr<std::uint8_t[]> stage_;  // made when first needed
  std::vector<iovec> runs_;
};

}  // namespace kvxfer
