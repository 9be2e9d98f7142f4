// A leg as decode's core sees it: where each chunk belongs, what has landed, and the gate that ends all placing.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/pool_map.hpp"
#include "digest/xxh3.hpp"
#include "lanes/leg_table.hpp"
#include "lanes/wire.hpp"

namespace kvxfer {

// A reservation's group as the caller names it: pool[k] is the pool page of logical page logical[k].
struct LegPages {
  std::uint32_t group = 0;
  std::uint32_t tokens_per_page = 0;
  std::vector<std::uint64_t> logical;
  std::vector<std::uint64_t> pool;
};

// A write frame that fits its leg: every destination in it comes from the leg's own tables.
struct WritePlan {
  const LegGroup* group = nullptr;
  const Slice* slice = nullptr;
  const RegionMap* region = nullptr;
  const std::uint64_t* pool_pages = nullptr;  // of the run, n_pages of them
  std::uint64_t page_first = 0;
  std::uint64_t chunk_bytes = 0;
  std::uint32_t slice_ordinal = 0;
  std::uint32_t n_pages = 0;

  std::uint64_t ordinal(std::uint32_t i) const noexcept { return group->ordinal(page_first + i, slice_ordinal); }
  std::uint8_t* destination(std::uint32_t i) const noexcept { return region->page(pool_pages[i]) + slice->dst_offset; }
};

class LegIn {
 public:
  // What one lane did for this leg. Written by that lane's thread, read by anyone.
  class LaneShare {
   public:
    explicit LaneShare(std::uint64_t words) : placed_(std::make_unique<std::atomic<std::uint64_t>[]>(words)) {}

    std::unique_ptr<std::atomic<std::uint64_t>[]> placed_;  // bitmap by ordinal
    bool committed = false;                                 // lane thread only: its commit record came
  };

  struct Report {
    std::map<std::uint32_t, std::string> placed;  // by lane, (n_chunks + 7) / 8 bytes each
    std::vector<std::uint64_t> folds;             // empty without verify
    std::uint64_t violations = 0;
    std::uint64_t bytes_landed = 0;
  };

  // `pool` must outlive the leg. Throws std::invalid_argument("bounds: ...") where a slice or page does not fit it.
  LegIn(const PoolMap& pool, std::uint64_t reservation, const std::array<std::uint8_t, 16>& epoch, std::uint32_t leg,
        bool verify, std::string_view slices, std::vector<LegPages> groups);
  LegIn(const LegIn&) = delete;
  LegIn& operator=(const LegIn&) = delete;

  bool verify() const noexcept { return verify_; }
  const LegTable& table() const noexcept { return table_; }

  // The gate. Whoever writes into the leg's pages holds it shared, having seen live() under it; revoke() closes it.
  std::shared_mutex& gate() noexcept { return gate_; }
  bool live() const noexcept { return live_.load(std::memory_order_acquire); }
  void revoke();

  // Looks the frame's chunks up; false, and `why`, where it names something that is not of this leg.
  bool plan(const wire::FrameHeader& header, WritePlan& plan, std::string& why) const;
  // Takes the plan's chunks for one lane. False where one was taken before: it would be placed twice.
  bool claim(const WritePlan& plan) noexcept;
  // The digest of chunk `ordinal`, which the caller has claimed; counts only once land() says so.
  void set_content(std::uint64_t ordinal, std::uint64_t digest) noexcept { content_[ordinal] = digest; }
  // All chunks of the plan lie in their pages.
  void land(const WritePlan& plan, LaneShare& share) noexcept;

  LaneShare& share(std::uint32_t lane);
  // Counts, and says whether this one is still worth an event: a peer that errs without end must not fill the queue.
  bool add_violation() noexcept;
  // Once per leg: true for the first caller.
  bool first_source_failure() noexcept { return !source_failed_.exchange(true); }

  Report report() const;
  std::vector<std::uint64_t> digests() const;  // by ordinal, 0 where nothing landed; all 0 without verify

 private:
  std::vector<std::uint64_t> present() const;

  const std::uint64_t reservation_;
  const std::array<std::uint8_t, 16> epoch_;
  const std::uint32_t leg_;
  const bool verify_;
  const LegTable table_;
  std::vector<std::vector<std::uint64_t>> pool_pages_;  // in the order of table_.groups()
  std::vector<const RegionMap*> regions_;               // by slice
  std::unique_ptr<std::atomic<std::uint64_t>[]> claimed_;
  std::unique_ptr<std::uint64_t[]> content_;  // published by the placed bit of the same ordinal

  std::shared_mutex gate_;
  std::atomic<bool> live_{true};
  std::atomic<bool> source_failed_{false};
  std::atomic<std::uint64_t> violations_{0};
  std::atomic<std::uint64_t> bytes_landed_{0};
  mutable std::mutex shares_mutex_;
  std::map<std::uint32_t, std::unique_ptr<LaneShare>> shares_;
};

}  // namespace kvxfer
