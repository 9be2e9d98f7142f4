// Which chunk of a leg has which ordinal, and which chunks make up a fold: the arithmetic of record.hpp, shared by both
// ends so that they cannot differ. Immutable after construction, so any thread may read it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/pool_map.hpp"
#include "digest/xxh3.hpp"

namespace kvxfer {

// One of the reservation's groups as this leg sees it.
struct LegGroup {
  std::uint32_t group = 0;             // decode's group index
  std::uint32_t tokens_per_page = 0;   // 0: pages are not indexed by token
  std::vector<std::uint64_t> logical;  // logical page by page index, strictly ascending
  // Filled in by LegTable:
  std::uint32_t first_slice = 0;  // into LegTable::slices()
  std::uint32_t n_slices = 0;     // 0: this leg writes nothing of the group, which then has no ordinals and no folds
  std::uint64_t base = 0;         // ordinal of the group's first chunk
  std::uint64_t pages_per_fold = 1;
  std::uint64_t first_fold = 0;
  std::uint64_t n_folds = 0;

  std::uint64_t n_pages() const noexcept { return logical.size(); }
  std::uint64_t ordinal(std::uint64_t page_index, std::uint32_t slice_ordinal) const noexcept {
    return base + page_index * n_slices + slice_ordinal;
  }
};

// Reads packed SLICE_DTYPE records. Throws std::invalid_argument("bounds: ...") where the length is no multiple of 64.
std::vector<Slice> parse_slices(std::string_view bytes);

// True where the strided pattern is not empty, its runs do not overlap and it lies inside a page.
bool pattern_fits(std::uint32_t runs, std::uint64_t run_bytes, std::uint64_t offset, std::uint64_t stride,
                  std::uint64_t page_bytes) noexcept;

class LegTable {
 public:
  // Groups in any order; each at most once. Throws std::invalid_argument("bounds: ...") for slices that are not
  // strictly ascending by (group, region, slice) or name a group that is not given, for logical pages that are not
  // strictly ascending, and for chunk counts that overflow. Does not look at any pool.
  LegTable(std::vector<Slice> slices, std::vector<LegGroup> groups);

  const std::vector<Slice>& slices() const noexcept { return slices_; }
  const std::vector<LegGroup>& groups() const noexcept {
    return groups_;
  }  // ascending by group, those without slices too
  std::uint64_t n_chunks() const noexcept { return n_chunks_; }
  std::uint64_t n_folds() const noexcept { return n_folds_; }
  std::uint64_t bitmap_words() const noexcept { return (n_chunks_ + 63) / 64; }

  // The group with decode's index `group`, or nullptr.
  const LegGroup* find(std::uint32_t group) const noexcept;
  // The slices of a group, by slice ordinal.
  std::span<const Slice> slices_of(const LegGroup& group) const noexcept {
    return std::span(slices_).subspan(group.first_slice, group.n_slices);
  }

  // Folds of all groups over bound content digests. `content` has one digest a chunk; `present` is a bitmap by ordinal
  // of bitmap_words() words (bit k of word k / 64 is 1 << k % 64). A fold with an absent chunk is 0.
  std::vector<std::uint64_t> folds(const digest::BindKey& key, std::span<const std::uint64_t> content,
                                   std::span<const std::uint64_t> present) const;

 private:
  std::vector<Slice> slices_;
  std::vector<LegGroup> groups_;
  std::uint64_t n_chunks_ = 0;
  std::uint64_t n_folds_ = 0;
};

}  // namespace kvxfer
