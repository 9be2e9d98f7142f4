#include "lanes/local_reader.hpp"

#include <algorithm>
#include <cstring>

namespace kvxfer {
namespace {

// Shorter runs are gathered first: a digest over many of them at once is faster than one call for each.
constexpr std::uint64_t kLeastRunBytes = 2048;
constexpr std::size_t kMaxRuns = 1024;  // IOV_MAX

}  // namespace

LocalReader::LocalReader(const PeerMemory& source, const std::atomic<bool>& stop) : source_(source), stop_(stop) {}

LocalReader::Cursor::Cursor(const PeerMemory::Region& region, const WritePlan& plan,
                            std::span<const std::uint64_t> pages) noexcept
    : region_(region), slice_(*plan.slice), pages_(pages), runs_(slice_.runs), run_bytes_(slice_.run_bytes) {
  if (slice_.src_stride == slice_.run_bytes) {
    runs_ = 1;
    run_bytes_ = plan.chunk_bytes;
  }
}

std::uint64_t LocalReader::Cursor::address() const noexcept {
  return region_.address + pages_[index_] * region_.page_stride + slice_.src_offset + run_ * slice_.src_stride +
         inside_;
}

void LocalReader::Cursor::advance(std::uint64_t n) noexcept {
  inside_ += n;
  if (inside_ < run_bytes_) return;
  inside_ = 0;
  if (++run_ < runs_) return;
  run_ = 0;
  ++index_;
}

void LocalReader::Cursor::prefetch_next() const noexcept {
  if (runs_ != 1 || index_ + 1 >= pages_.size()) return;
  const std::uint64_t next = region_.address + pages_[index_ + 1] * region_.page_stride + slice_.src_offset;
  digest::prefetch(reinterpret_cast<const void*>(next), static_cast<std::size_t>(run_bytes_));
}

LocalReader::Outcome LocalReader::copy(LegIn& leg, const WritePlan& plan, std::span<const std::uint64_t> source_pages,
                                       std::string& why) {
  const Slice& slice = *plan.slice;
  const PeerMemory::Region* region = source_.region(slice.src_group, slice.src_region);
  if (region == nullptr) {
    why = "group " + std::to_string(slice.src_group) + ", region " + std::to_string(slice.src_region) +
          " is not in the peer's pool";
    return Outcome::kRefused;
  }
  if (!pattern_fits(slice.runs, slice.run_bytes, slice.src_offset, slice.src_stride, region->page_bytes)) {
    why = "slice reaches beyond the peer's page of " + std::to_string(region->page_bytes) + " bytes";
    return Outcome::kRefused;
  }
  const auto beyond = std::find_if(source_pages.begin(), source_pages.end(),
                                   [&](std::uint64_t page) { return page >= region->n_pages; });
  if (beyond != source_pages.end()) {
    why = "page " + std::to_string(*beyond) + " of the peer's region of " + std::to_string(region->n_pages);
    return Outcome::kRefused;
  }
  ChunkPlacer placer(leg, plan);
  Cursor cursor(*region, plan, source_pages);
  const bool mapped = region->mapped != nullptr;
  if (mapped && (cursor.whole_chunks() || cursor.run_bytes() >= kLeastRunBytes)) {
    return copy_mapped(leg, placer, cursor) ? Outcome::kCopied : Outcome::kDead;
  }
  return copy_gathered(leg, placer, cursor, mapped, why);
}

bool LocalReader::copy_mapped(LegIn& leg, ChunkPlacer& placer, Cursor& cursor) {
  while (!placer.done()) {
    const GateHold hold(leg);
    for (std::size_t total = 0; total < kPieceBytes && !placer.done();) {
      if (!go_on(leg)) return false;
      auto n = static_cast<std::size_t>(std::min<std::uint64_t>(cursor.left_in_run(), kPieceBytes));
      cursor.prefetch_next();
      n = placer.place(reinterpret_cast<const std::uint8_t*>(cursor.address()), n);
      cursor.advance(n);
      total += n;
    }
  }
  return true;
}

LocalReader::Outcome LocalReader::copy_gathered(LegIn& leg, ChunkPlacer& placer, Cursor& cursor, bool mapped,
                                                std::string& why) {
  if (!stage_) stage_ = std::make_unique<std::uint8_t[]>(kPieceBytes);
  while (!placer.done()) {
    if (!go_on(leg)) return Outcome::kDead;
    std::size_t filled = 0;
    runs_.clear();
    while (!cursor.done() && filled < kPieceBytes && (mapped || runs_.size() < kMaxRuns)) {
      const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(cursor.left_in_run(), kPieceBytes - filled));
      auto* at = reinterpret_cast<std::uint8_t*>(cursor.address());
      if (mapped) {
        std::memcpy(stage_.get() + filled, at, n);
      } else {
        runs_.push_back({at, n});
      }
      filled += n;
      cursor.advance(n);
    }
    if (!mapped && !source_.read(runs_, stage_.get(), filled, why)) return Outcome::kSource;
    const GateHold hold(leg);
    for (std::size_t at = 0; at < filled;) {
      if (!go_on(leg)) return Outcome::kDead;
      at += placer.place(stage_.get() + at, filled - at);
    }
  }
  return Outcome::kCopied;
}

}  // namespace kvxfer
