// A leg as prefill's core sees it: which source bytes make up each chunk, what is queued, what each lane has posted.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/pool_map.hpp"
#include "lanes/leg_table.hpp"
#include "lanes/wire.hpp"

namespace kvxfer {

// Where a slice's chunks lie in prefill's pages; runs that touch are merged.
struct SliceSource {
  const RegionMap* region = nullptr;
  std::uint32_t group = 0;  // prefill's group index
  std::uint32_t region_index = 0;
  std::uint64_t runs = 0;
  std::uint64_t run_bytes = 0;
  std::uint64_t offset = 0;
  std::uint64_t stride = 0;
  bool whole_page = false;
  std::uint32_t pages_per_frame = 1;

  std::uint64_t chunk_bytes() const noexcept { return runs * run_bytes; }
  const std::uint8_t* chunk(std::uint64_t page) const noexcept { return region->page(page) + offset; }
};

// One frame's worth of chunks: a run of pages of one slice.
struct Batch {
  std::uint32_t group = 0;  // position in table.groups()
  std::uint32_t slice = 0;  // ordinal among the group's slices
  std::uint32_t page_first = 0;
  std::uint32_t n_pages = 0;
  // The digest taken at write() is of whole pages and the slice is a part: content[ordinal] holds the page's digest
  // until the lane has checked it against the source and put the slice's in its place.
  bool recheck = false;
  bool progress = false;  // no chunks: a progress record
};

// A page index whose source page is not known yet.
inline constexpr std::uint64_t kNoPage = ~std::uint64_t{0};

struct LegOutSpec {
  std::uint32_t session = 0;
  std::uint32_t generation = 0;
  std::uint64_t reservation = 0;
  std::uint32_t leg = 0;
  bool verify = true;
  bool carries_aux = false;
  std::vector<std::uint32_t> lanes;
};

// What commit() fixed; shared by the legs of a grant.
struct Commit {
  std::uint64_t n_tokens = 0;
  std::string aux;
};

class LegOut {
 public:
  // `pool` must outlive the leg. Throws std::invalid_argument("bounds: ...") for slices outside the pool or an empty
  // lane set. `first_tokens` has one element for each of table.groups().
  LegOut(const LegOutSpec& spec, LegTable table, std::vector<std::uint64_t> first_tokens, const PoolMap& pool,
         std::uint64_t frame_bytes);
  LegOut(const LegOut&) = delete;
  LegOut& operator=(const LegOut&) = delete;

  // ---- immutable
  const LegOutSpec spec;
  const LegTable table;
  const std::vector<std::uint64_t> first_tokens;
  const std::vector<SliceSource>& sources() const noexcept { return sources_; }  // by position in table.slices()
  const SliceSource& source(const Batch& batch) const noexcept {
    return sources_[table.groups()[batch.group].first_slice + batch.slice];
  }
  // Prefill's group of a group's slices; all slices of one group come from one.
  std::optional<std::uint32_t> source_group(std::size_t group) const noexcept;
  // Slice ordinals of a group that are cut from a source region.
  std::span<const std::pair<std::uint32_t, std::uint32_t>> slices_from(std::size_t group,
                                                                       std::uint32_t region) const noexcept;
  // Position of a lane in the leg's lane set, or -1.
  int lane_position(std::uint32_t lane) const noexcept;

  // ---- filled in before a chunk is queued (grant's mutex), read by the lane that takes it
  std::vector<std::vector<std::uint64_t>> source_pages;  // by position in table.groups(), by page index
  std::vector<std::uint64_t> content;                    // content digest by ordinal; empty without verify

  // ---- grant's mutex
  std::uint64_t skipped = 0;

  // ---- session's mutex
  enum class Record : std::uint8_t { kDue, kSending, kSent, kConfirmed };
  struct LaneShare {
    std::vector<std::uint64_t> posted;  // bitmap by ordinal, allocated with the first chunk
    std::uint64_t n_posted = 0;
    Record record = Record::kDue;
  };
  enum class End : std::uint8_t { kOpen, kDrain, kFail };

  std::deque<Batch> queue;
  std::vector<LaneShare> shares;         // by position in spec.lanes
  std::shared_ptr<const Commit> commit;  // set: admission is closed and records are due
  std::optional<wire::SourceRef> pin;    // the slot that same-host readers check
  std::uint32_t posting = 0;             // batches taken by a lane and not yet posted
  std::uint32_t reading = 0;             // lanes that may read the sources right now
  bool active = false;                   // on the session's list of legs with something to send
  bool reported = false;                 // LEG_DRAINED or LEG_FAILED was pushed
  bool silent = false;                   // detached before anybody asked for its end
  End end = End::kOpen;
  std::string cause;

  // Set with `end`, for lanes in the middle of a frame: stop reading the sources.
  std::atomic<bool> cancelled{false};

  bool records_pending() const noexcept;
  // Takes the batch's chunks into a lane's bitmap.
  void mark_posted(const Batch& batch, std::size_t position);
  std::vector<std::uint64_t> posted_on_any() const;
  // The event's data: u64 chunks posted by lane, in order of the lane set.
  std::string posted_counts() const;

 private:
  std::vector<SliceSource> sources_;
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>>
      by_region_;  // by group: (region, slice ordinal) sorted
};

}  // namespace kvxfer
