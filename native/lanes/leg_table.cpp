#include "lanes/leg_table.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace kvxfer {
namespace {

constexpr std::uint64_t kTokensPerFold = 64;
// Far above any real leg, far below where the sums here could wrap.
constexpr std::uint64_t kMaxChunks = std::uint64_t{1} << 40;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("bounds: " + what); }

bool is_set(std::span<const std::uint64_t> bitmap, std::uint64_t bit) noexcept {
  return (bitmap[bit / 64] >> (bit % 64)) & 1;
}

}  // namespace

std::vector<Slice> parse_slices(std::string_view bytes) {
  if (bytes.size() % sizeof(Slice) != 0) {
    refuse("slices of " + std::to_string(bytes.size()) + " bytes are not whole records of 64");
  }
  std::vector<Slice> slices(bytes.size() / sizeof(Slice));
  if (!slices.empty()) std::memcpy(slices.data(), bytes.data(), bytes.size());
  return slices;
}

bool pattern_fits(std::uint32_t runs, std::uint64_t run_bytes, std::uint64_t offset, std::uint64_t stride,
                  std::uint64_t page_bytes) noexcept {
  if (runs == 0 || run_bytes == 0 || run_bytes > page_bytes) return false;
  if (runs > 1 && stride < run_bytes) return false;
  std::uint64_t end = 0;
  if (__builtin_mul_overflow(std::uint64_t{runs} - 1, stride, &end)) return false;
  if (__builtin_add_overflow(end, offset, &end)) return false;
  if (__builtin_add_overflow(end, run_bytes, &end)) return false;
  return end <= page_bytes;
}

LegTable::LegTable(std::vector<Slice> slices, std::vector<LegGroup> groups)
    : slices_(std::move(slices)), groups_(std::move(groups)) {
  const auto name = [](const Slice& s) { return std::tuple(s.group, s.region, s.slice); };
  for (std::size_t i = 1; i < slices_.size(); ++i) {
    if (name(slices_[i - 1]) >= name(slices_[i]))
      refuse("slices are not sorted by (group, region, slice), or one comes twice");
  }
  std::sort(groups_.begin(), groups_.end(), [](const auto& a, const auto& b) { return a.group < b.group; });
  std::size_t next = 0;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    LegGroup& g = groups_[i];
    if (i > 0 && groups_[i - 1].group == g.group) refuse("group " + std::to_string(g.group) + " comes twice");
    if (std::adjacent_find(g.logical.begin(), g.logical.end(), std::greater_equal<>()) != g.logical.end()) {
      refuse("logical pages of group " + std::to_string(g.group) + " are not strictly ascending");
    }
    g.first_slice = static_cast<std::uint32_t>(next);
    while (next < slices_.size() && slices_[next].group == g.group) ++next;
    g.n_slices = static_cast<std::uint32_t>(next - g.first_slice);
    g.base = n_chunks_;
    g.first_fold = n_folds_;
    g.pages_per_fold = g.tokens_per_page == 0 ? 1 : std::max<std::uint64_t>(1, kTokensPerFold / g.tokens_per_page);
    g.n_folds = 0;
    if (g.n_slices == 0) continue;
    std::uint64_t chunks = 0;
    if (__builtin_mul_overflow(g.n_pages(), std::uint64_t{g.n_slices}, &chunks) || chunks > kMaxChunks - n_chunks_) {
      refuse("a leg of more than 2^40 chunks");
    }
    n_chunks_ += chunks;
    g.n_folds = (g.n_pages() + g.pages_per_fold - 1) / g.pages_per_fold;
    n_folds_ += g.n_folds;
  }
  if (next != slices_.size())
    refuse("a slice of group " + std::to_string(slices_[next].group) + ", which is not reserved");
}

const LegGroup* LegTable::find(std::uint32_t group) const noexcept {
  const auto at = std::lower_bound(groups_.begin(), groups_.end(), group,
                                   [](const LegGroup& g, std::uint32_t index) { return g.group < index; });
  return at != groups_.end() && at->group == group ? &*at : nullptr;
}

std::vector<std::uint64_t> LegTable::folds(const digest::BindKey& key, std::span<const std::uint64_t> content,
                                           std::span<const std::uint64_t> present) const {
  std::vector<std::uint64_t> out(n_folds_, 0);
  std::vector<std::uint64_t> bound;
  for (const LegGroup& g : groups_) {
    const auto slices = slices_of(g);
    for (std::uint64_t f = 0; f < g.n_folds; ++f) {
      const std::uint64_t first = f * g.pages_per_fold;
      const std::uint64_t stop = std::min(first + g.pages_per_fold, g.n_pages());
      bound.clear();
      bool whole = true;
      for (std::uint64_t k = first; k < stop && whole; ++k) {
        for (std::uint32_t s = 0; s < g.n_slices; ++s) {
          const std::uint64_t at = g.ordinal(k, s);
          if (!is_set(present, at)) {
            whole = false;
            break;
          }
          bound.push_back(digest::bind(content[at], key, g.group, slices[s].region, slices[s].slice, g.logical[k]));
        }
      }
      if (whole) out[g.first_fold + f] = digest::xxh3_64(bound.data(), bound.size() * sizeof(std::uint64_t));
    }
  }
  return out;
}

}  // namespace kvxfer
