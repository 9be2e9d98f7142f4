// Puts the chunks of one write frame into their pages and digests them on the way, from pieces of any size in the order
// they travel. Holds no lock: the caller holds the leg's gate around every call that writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <shared_mutex>

#include "digest/xxh3.hpp"
#include "lanes/leg_in.hpp"

namespace kvxfer {

class ChunkPlacer {
 public:
  // Where a chunk is cut, so that the digest of the next piece stays on its fast path.
  static constexpr std::size_t kCutBytes = 1024;

  ChunkPlacer(LegIn& leg, const WritePlan& plan) noexcept;

  bool done() const noexcept { return index_ == plan_.n_pages; }
  std::uint64_t left_in_chunk() const noexcept { return plan_.chunk_bytes - at_; }

  // Places bytes up to the end of the current chunk; returns how many.
  std::size_t place(const std::uint8_t* data, std::size_t n) noexcept;

 private:
  void scatter(const std::uint8_t* data, std::size_t n) noexcept;
  void advance(std::size_t n) noexcept;

  LegIn& leg_;
  const WritePlan& plan_;
  const bool contiguous_;
  const bool verify_;
  std::uint32_t index_ = 0;  // of the current chunk in the frame
  std::uint64_t at_ = 0;     // bytes of it that are placed
  digest::Hasher hasher_;
};

// Holds a leg's gate while bytes are placed. Streaming stores are weakly ordered: they are fenced before it lets go.
class GateHold {
 public:
  explicit GateHold(LegIn& leg) : lock_(leg.gate()) {}
  ~GateHold() { digest::store_fence(); }
  GateHold(const GateHold&) = delete;
  GateHold& operator=(const GateHold&) = delete;

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace kvxfer
