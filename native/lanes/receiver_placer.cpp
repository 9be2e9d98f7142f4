#include "lanes/receiver_placer.hpp"

#include <algorithm>
#include <cstring>

#include "lanes/receiver_copy.hpp"

namespace kvxfer {
namespace {

// From here on a run is worth its own fused copy; shorter ones are digested together, cache hot, and copied apart.
constexpr std::uint64_t kFusedRunBytes = 2048;

}  // namespace

ChunkPlacer::ChunkPlacer(LegIn& leg, const WritePlan& plan) noexcept
    : leg_(leg),
      plan_(plan),
      contiguous_(plan.slice->runs == 1 || plan.slice->dst_stride == plan.slice->run_bytes),
      verify_(leg.verify()) {}

std::size_t ChunkPlacer::place(const std::uint8_t* data, std::size_t n) noexcept {
  n = static_cast<std::size_t>(std::min<std::uint64_t>(n, left_in_chunk()));
  if (!contiguous_) {
    scatter(data, n);
  } else {
    std::uint8_t* to = plan_.destination(index_) + at_;
    if (!verify_) {
      copy_streaming(to, data, n);
    } else if (n == plan_.chunk_bytes) {
      leg_.set_content(plan_.ordinal(index_), digest::copy_xxh3_64_unfenced(to, data, n));
      ++index_;
      return n;
    } else {
      hasher_.copy_update_unfenced(to, data, n);
    }
  }
  advance(n);
  return n;
}

void ChunkPlacer::scatter(const std::uint8_t* data, std::size_t n) noexcept {
  const Slice& slice = *plan_.slice;
  const bool fused = verify_ && slice.run_bytes >= kFusedRunBytes;
  if (verify_ && !fused) hasher_.update(data, n);
  std::uint8_t* page = plan_.destination(index_);
  std::uint64_t run = at_ / slice.run_bytes;
  std::uint64_t inside = at_ % slice.run_bytes;
  while (n > 0) {
    const auto take = static_cast<std::size_t>(std::min<std::uint64_t>(n, slice.run_bytes - inside));
    std::uint8_t* to = page + run * slice.dst_stride + inside;
    if (fused) {
      hasher_.copy_update_unfenced(to, data, take);
    } else {
      std::memcpy(to, data, take);
    }
    data += take;
    n -= take;
    ++run;
    inside = 0;
  }
}

void ChunkPlacer::advance(std::size_t n) noexcept {
  at_ += n;
  if (at_ < plan_.chunk_bytes) return;
  if (verify_) {
    leg_.set_content(plan_.ordinal(index_), hasher_.digest());
    hasher_.reset();
  }
  ++index_;
  at_ = 0;
}

}  // namespace kvxfer
