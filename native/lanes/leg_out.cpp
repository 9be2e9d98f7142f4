#include "lanes/leg_out.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace kvxfer {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("bounds: " + what); }

SliceSource resolve(const Slice& slice, const PoolMap& pool, std::uint64_t frame_bytes) {
  const std::string name = "slice (group " + std::to_string(slice.group) + ", region " + std::to_string(slice.region) +
                           ", unit " + std::to_string(slice.slice) + ")";
  if (slice.src_group >= pool.groups.size() || slice.src_region >= pool.groups[slice.src_group].size()) {
    refuse(name + " names source region " + std::to_string(slice.src_region) + " of group " +
           std::to_string(slice.src_group) + ", which the pool does not have");
  }
  const RegionMap& region = pool.groups[slice.src_group][slice.src_region];
  if (!pattern_fits(slice.runs, slice.run_bytes, slice.src_offset, slice.src_stride, region.page_bytes)) {
    refuse(name + " does not lie inside source pages of " + std::to_string(region.page_bytes) + " bytes");
  }
  SliceSource source{.region = &region,
                     .group = slice.src_group,
                     .region_index = slice.src_region,
                     .runs = slice.runs,
                     .run_bytes = slice.run_bytes,
                     .offset = slice.src_offset,
                     .stride = slice.src_stride};
  if (source.runs > 1 && source.stride == source.run_bytes) {
    source.run_bytes *= source.runs;
    source.runs = 1;
  }
  source.whole_page = source.chunk_bytes() == region.page_bytes;
  const std::uint64_t fit = frame_bytes / source.chunk_bytes();
  source.pages_per_frame = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(fit, 1, wire::kMaxPagesPerFrame));
  return source;
}

}  // namespace

LegOut::LegOut(const LegOutSpec& spec_in, LegTable table_in, std::vector<std::uint64_t> first_tokens_in,
               const PoolMap& pool, std::uint64_t frame_bytes)
    : spec(spec_in), table(std::move(table_in)), first_tokens(std::move(first_tokens_in)) {
  if (spec.lanes.empty()) refuse("a leg without lanes");
  for (std::size_t i = 0; i < spec.lanes.size(); ++i) {
    if (lane_position(spec.lanes[i]) != static_cast<int>(i)) {
      refuse("lane " + std::to_string(spec.lanes[i]) + " comes twice");
    }
  }
  sources_.reserve(table.slices().size());
  for (const Slice& slice : table.slices()) sources_.push_back(resolve(slice, pool, frame_bytes));
  for (const LegGroup& group : table.groups()) {
    if (group.n_pages() > std::numeric_limits<std::uint32_t>::max()) refuse("more than 2^32 pages in one group");
    auto& by_region = by_region_.emplace_back();
    for (std::uint32_t s = 0; s < group.n_slices; ++s) {
      const SliceSource& source = sources_[group.first_slice + s];
      if (source.group != sources_[group.first_slice].group) {
        refuse("slices of group " + std::to_string(group.group) + " come from several source groups");
      }
      by_region.emplace_back(source.region_index, s);
    }
    std::sort(by_region.begin(), by_region.end());
    source_pages.emplace_back(group.n_slices == 0 ? 0 : group.n_pages(), kNoPage);
  }
  if (spec.verify) content.resize(table.n_chunks());
  shares.resize(spec.lanes.size());
}

std::optional<std::uint32_t> LegOut::source_group(std::size_t group) const noexcept {
  const LegGroup& g = table.groups()[group];
  if (g.n_slices == 0) return std::nullopt;
  return sources_[g.first_slice].group;
}

std::span<const std::pair<std::uint32_t, std::uint32_t>> LegOut::slices_from(std::size_t group,
                                                                             std::uint32_t region) const noexcept {
  const auto& all = by_region_[group];
  const auto first = std::lower_bound(all.begin(), all.end(), std::pair(region, std::uint32_t{0}));
  auto last = first;
  while (last != all.end() && last->first == region) ++last;
  return {first, last};
}

int LegOut::lane_position(std::uint32_t lane) const noexcept {
  const auto at = std::find(spec.lanes.begin(), spec.lanes.end(), lane);
  return at == spec.lanes.end() ? -1 : static_cast<int>(at - spec.lanes.begin());
}

bool LegOut::records_pending() const noexcept {
  return commit && std::any_of(shares.begin(), shares.end(), [](const auto& s) { return s.record == Record::kDue; });
}

void LegOut::mark_posted(const Batch& batch, std::size_t position) {
  LaneShare& share = shares[position];
  if (share.posted.empty()) share.posted.resize(table.bitmap_words());
  const LegGroup& group = table.groups()[batch.group];
  for (std::uint32_t i = 0; i < batch.n_pages; ++i) {
    const std::uint64_t at = group.ordinal(std::uint64_t{batch.page_first} + i, batch.slice);
    share.posted[at / 64] |= std::uint64_t{1} << (at % 64);
  }
  share.n_posted += batch.n_pages;
}

std::vector<std::uint64_t> LegOut::posted_on_any() const {
  std::vector<std::uint64_t> all(table.bitmap_words());
  for (const LaneShare& share : shares) {
    for (std::size_t i = 0; i < share.posted.size(); ++i) all[i] |= share.posted[i];
  }
  return all;
}

std::string LegOut::posted_counts() const {
  std::string counts;
  for (const LaneShare& share : shares) {
    counts.append(reinterpret_cast<const char*>(&share.n_posted), sizeof(share.n_posted));
  }
  return counts;
}

}  // namespace kvxfer
