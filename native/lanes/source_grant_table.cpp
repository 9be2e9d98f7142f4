#include "lanes/source_grant_table.hpp"

#include <algorithm>
#include <stdexcept>

namespace kvxfer {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("bounds: " + what); }
[[noreturn]] void refuse_duplicate(const std::string& what) { throw std::invalid_argument("duplicate: " + what); }

std::string page_name(std::uint32_t group, std::uint64_t logical) {
  return "logical page " + std::to_string(logical) + " of group " + std::to_string(group);
}

template <typename T>
std::optional<T> find_twice(std::span<const T> values) {
  if (std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end()) return std::nullopt;
  std::vector<T> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const auto at = std::adjacent_find(sorted.begin(), sorted.end());
  return at == sorted.end() ? std::nullopt : std::optional(*at);
}

}  // namespace

SourceTable::SourceTable(const PoolMap& pool, bool digests) : pool_(pool), digests_(digests) {
  for (const auto& regions : pool.groups) groups_.emplace_back().regions.resize(regions.size());
}

void SourceTable::check(std::uint32_t group, std::span<const std::uint64_t> logical,
                        std::span<const std::uint64_t> pages, std::span<const std::uint32_t> regions) const {
  if (group >= groups_.size()) {
    refuse("group " + std::to_string(group) + " of a pool of " + std::to_string(groups_.size()) + " groups");
  }
  if (logical.size() != pages.size()) {
    refuse(std::to_string(logical.size()) + " logical pages for " + std::to_string(pages.size()) + " source pages");
  }
  const auto& maps = pool_.groups[group];
  const std::uint64_t highest = pages.empty() ? 0 : *std::max_element(pages.begin(), pages.end());
  for (const std::uint32_t region : regions) {
    if (region >= maps.size()) {
      refuse("region " + std::to_string(region) + " of group " + std::to_string(group) + ", which has " +
             std::to_string(maps.size()));
    }
    if (!pages.empty() && highest >= maps[region].n_pages) {
      refuse("source page " + std::to_string(highest) + " of group " + std::to_string(group) + ", which has " +
             std::to_string(maps[region].n_pages));
    }
  }
  if (const auto twice = find_twice(regions)) refuse_duplicate("region " + std::to_string(*twice) + " comes twice");
  if (const auto twice = find_twice(logical)) refuse_duplicate(page_name(group, *twice) + " comes twice in one write");
  for (std::size_t i = 0; i < logical.size(); ++i) {
    if (logical[i] >= kMaxLogical) refuse(page_name(group, logical[i]) + " is beyond 2^32");
    const auto row = find(group, logical[i]);
    if (!row) continue;
    for (const std::uint32_t region : regions) {
      if (written(group, region, *row)) {
        refuse_duplicate(page_name(group, logical[i]) + ", region " + std::to_string(region) + ", was written before");
      }
    }
    if (groups_[group].pages[*row] != pages[i]) {
      refuse(page_name(group, logical[i]) + " lies in source page " + std::to_string(groups_[group].pages[*row]) +
             ", not " + std::to_string(pages[i]));
    }
  }
}

std::vector<SourceTable::Row> SourceTable::rows(std::uint32_t group, std::span<const std::uint64_t> logical,
                                                std::span<const std::uint64_t> pages) {
  Group& g = groups_[group];
  std::vector<Row> rows;
  rows.reserve(logical.size());
  for (std::size_t i = 0; i < logical.size(); ++i) {
    const std::size_t block = logical[i] / kBlock;
    if (block >= g.by_logical.size()) g.by_logical.resize(block + 1);
    if (!g.by_logical[block]) {
      g.by_logical[block] = std::make_unique<std::array<Row, kBlock>>();
      g.by_logical[block]->fill(kNoRow);
    }
    Row& row = (*g.by_logical[block])[logical[i] % kBlock];
    if (row == kNoRow) {
      if (g.pages.size() == kNoRow) refuse("more than 2^32 pages in one group");
      g.pages.push_back(pages[i]);
      g.logical.push_back(logical[i]);
      row = static_cast<Row>(g.pages.size() - 1);
    }
    rows.push_back(row);
  }
  return rows;
}

void SourceTable::add(std::uint32_t group, std::uint32_t region, Row row, std::uint64_t digest) {
  Group& g = groups_[group];
  Region& r = g.regions[region];
  if (r.written.size() <= row / 64) r.written.resize((g.pages.size() + 63) / 64);
  r.written[row / 64] |= std::uint64_t{1} << (row % 64);
  if (digests_) {
    if (r.digests.size() <= row) r.digests.resize(g.pages.size());
    r.digests[row] = digest;
  }
  ++r.chunks;
  ++chunks_;
  g.highest = std::max(g.highest, static_cast<std::int64_t>(g.logical[row]));
}

std::optional<SourceTable::Row> SourceTable::find(std::uint32_t group, std::uint64_t logical) const noexcept {
  const auto& blocks = groups_[group].by_logical;
  const std::uint64_t block = logical / kBlock;
  if (block >= blocks.size() || !blocks[block]) return std::nullopt;
  const Row row = (*blocks[block])[logical % kBlock];
  return row == kNoRow ? std::nullopt : std::optional(row);
}

bool SourceTable::written(std::uint32_t group, std::uint32_t region, Row row) const noexcept {
  const auto& bits = groups_[group].regions[region].written;
  return row / 64 < bits.size() && ((bits[row / 64] >> (row % 64)) & 1) != 0;
}

std::uint64_t SourceTable::digest(std::uint32_t group, std::uint32_t region, Row row) const noexcept {
  return digests_ ? groups_[group].regions[region].digests[row] : 0;
}

std::uint64_t SourceTable::chunks(std::uint32_t group, std::uint32_t region) const noexcept {
  return groups_[group].regions[region].chunks;
}

std::int64_t SourceTable::highest_logical(std::uint32_t group) const noexcept {
  return group < groups_.size() ? groups_[group].highest : -1;
}

void SourceTable::clear() noexcept {
  for (Group& g : groups_) g = {};
}

}  // namespace kvxfer
