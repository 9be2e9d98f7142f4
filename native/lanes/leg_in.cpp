#include "lanes/leg_in.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace kvxfer {
namespace {

constexpr std::uint64_t kViolationEventsPerLeg = 8;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("bounds: " + what); }

LegTable make_table(std::string_view slices, const std::vector<LegPages>& groups) {
  std::vector<LegGroup> leg_groups;
  leg_groups.reserve(groups.size());
  for (const LegPages& g : groups) {
    if (g.logical.size() != g.pool.size()) {
      refuse("group " + std::to_string(g.group) + " has " + std::to_string(g.logical.size()) + " logical pages and " +
             std::to_string(g.pool.size()) + " pool pages");
    }
    LegGroup& group = leg_groups.emplace_back();
    group.group = g.group;
    group.tokens_per_page = g.tokens_per_page;
    group.logical = g.logical;
  }
  return LegTable(parse_slices(slices), std::move(leg_groups));
}

const RegionMap* region_of(const PoolMap& pool, const Slice& slice) {
  if (slice.group >= pool.groups.size() || slice.region >= pool.groups[slice.group].size()) {
    refuse("slice of group " + std::to_string(slice.group) + ", region " + std::to_string(slice.region) +
           ", which the pool does not have");
  }
  const RegionMap& region = pool.groups[slice.group][slice.region];
  if (!pattern_fits(slice.runs, slice.run_bytes, slice.dst_offset, slice.dst_stride, region.page_bytes)) {
    refuse("slice of group " + std::to_string(slice.group) + ", region " + std::to_string(slice.region) +
           " does not lie inside a page of " + std::to_string(region.page_bytes) + " bytes");
  }
  return &region;
}

}  // namespace

LegIn::LegIn(const PoolMap& pool, std::uint64_t reservation, const std::array<std::uint8_t, 16>& epoch,
             std::uint32_t leg, bool verify, std::string_view slices, std::vector<LegPages> groups)
    : reservation_(reservation), epoch_(epoch), leg_(leg), verify_(verify), table_(make_table(slices, groups)) {
  std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.group < b.group; });
  for (LegPages& g : groups) pool_pages_.push_back(std::move(g.pool));
  for (const Slice& slice : table_.slices()) regions_.push_back(region_of(pool, slice));
  for (std::size_t i = 0; i < table_.groups().size(); ++i) {
    const LegGroup& g = table_.groups()[i];
    for (std::uint32_t s = 0; s < g.n_slices; ++s) {
      const std::uint64_t n_pages = regions_[g.first_slice + s]->n_pages;
      const auto beyond =
          std::find_if(pool_pages_[i].begin(), pool_pages_[i].end(), [&](std::uint64_t p) { return p >= n_pages; });
      if (beyond != pool_pages_[i].end()) {
        refuse("page " + std::to_string(*beyond) + " of group " + std::to_string(g.group) + ", which has " +
               std::to_string(n_pages));
      }
    }
  }
  claimed_ = std::make_unique<std::atomic<std::uint64_t>[]>(table_.bitmap_words());
  if (verify_) content_ = std::make_unique<std::uint64_t[]>(table_.n_chunks());
}

void LegIn::revoke() {
  live_.store(false, std::memory_order_seq_cst);
  // Whoever saw the leg live holds the gate until its bytes are in; whoever comes later sees it dead.
  const std::unique_lock lock(gate_);
}

bool LegIn::plan(const wire::FrameHeader& header, WritePlan& plan, std::string& why) const {
  const LegGroup* group = table_.find(header.group);
  if (group == nullptr) {
    why = "group " + std::to_string(header.group) + " is not in the leg";
    return false;
  }
  if (header.slice >= group->n_slices) {
    why = "slice " + std::to_string(header.slice) + " of group " + std::to_string(header.group) + ", which has " +
          std::to_string(group->n_slices);
    return false;
  }
  const std::uint64_t n_pages = group->n_pages();
  if (header.n_pages == 0 || header.page_first >= n_pages || header.n_pages > n_pages - header.page_first) {
    why = "page indices from " + std::to_string(header.page_first) + ", " + std::to_string(header.n_pages) +
          " of them, of group " + std::to_string(header.group) + ", which has " + std::to_string(n_pages);
    return false;
  }
  const std::size_t slice = group->first_slice + header.slice;
  plan.group = group;
  plan.slice = &table_.slices()[slice];
  plan.region = regions_[slice];
  plan.pool_pages = pool_pages_[static_cast<std::size_t>(group - table_.groups().data())].data() + header.page_first;
  plan.page_first = header.page_first;
  plan.chunk_bytes = plan.slice->chunk_bytes();
  plan.slice_ordinal = header.slice;
  plan.n_pages = header.n_pages;
  return true;
}

bool LegIn::claim(const WritePlan& plan) noexcept {
  bool fresh = true;
  for (std::uint32_t i = 0; i < plan.n_pages; ++i) {
    const std::uint64_t ordinal = plan.ordinal(i);
    const std::uint64_t bit = std::uint64_t{1} << (ordinal % 64);
    if (claimed_[ordinal / 64].fetch_or(bit, std::memory_order_relaxed) & bit) fresh = false;
  }
  return fresh;
}

void LegIn::land(const WritePlan& plan, LaneShare& share) noexcept {
  for (std::uint32_t i = 0; i < plan.n_pages; ++i) {
    const std::uint64_t ordinal = plan.ordinal(i);
    std::atomic<std::uint64_t>& word = share.placed_[ordinal / 64];
    // Only this lane's thread writes the word.
    word.store(word.load(std::memory_order_relaxed) | std::uint64_t{1} << (ordinal % 64), std::memory_order_release);
  }
  bytes_landed_.fetch_add(plan.n_pages * plan.chunk_bytes, std::memory_order_relaxed);
}

LegIn::LaneShare& LegIn::share(std::uint32_t lane) {
  const std::lock_guard lock(shares_mutex_);
  std::unique_ptr<LaneShare>& share = shares_[lane];
  if (!share) share = std::make_unique<LaneShare>(table_.bitmap_words());
  return *share;
}

bool LegIn::add_violation() noexcept {
  return violations_.fetch_add(1, std::memory_order_acq_rel) < kViolationEventsPerLeg;
}

std::vector<std::uint64_t> LegIn::present() const {
  std::vector<std::uint64_t> words(table_.bitmap_words(), 0);
  const std::lock_guard lock(shares_mutex_);
  for (const auto& [lane, share] : shares_) {
    for (std::size_t w = 0; w < words.size(); ++w) words[w] |= share->placed_[w].load(std::memory_order_acquire);
  }
  return words;
}

LegIn::Report LegIn::report() const {
  Report report;
  const std::size_t bytes = (table_.n_chunks() + 7) / 8;
  {
    const std::lock_guard lock(shares_mutex_);
    for (const auto& [lane, share] : shares_) {
      std::string& bitmap = report.placed[lane];
      bitmap.resize(bytes);
      for (std::size_t at = 0; at < bytes; at += 8) {
        const std::uint64_t word = share->placed_[at / 8].load(std::memory_order_acquire);
        std::memcpy(bitmap.data() + at, &word, std::min<std::size_t>(8, bytes - at));
      }
    }
  }
  if (verify_) {
    digest::BindKey key{};
    key.reservation = reservation_;
    std::copy(epoch_.begin(), epoch_.end(), key.epoch);
    key.leg = leg_;
    report.folds = table_.folds(key, {content_.get(), table_.n_chunks()}, present());
  }
  report.violations = violations_.load(std::memory_order_acquire);
  report.bytes_landed = bytes_landed_.load(std::memory_order_relaxed);
  return report;
}

std::vector<std::uint64_t> LegIn::digests() const {
  std::vector<std::uint64_t> out(table_.n_chunks(), 0);
  if (!verify_) return out;
  const std::vector<std::uint64_t> words = present();
  for (std::uint64_t at = 0; at < out.size(); ++at) {
    if ((words[at / 64] >> (at % 64)) & 1) out[at] = content_[at];
  }
  return out;
}

}  // namespace kvxfer
