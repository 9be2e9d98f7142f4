// A pool's memory in this process, by group and region. Immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvxfer {

struct RegionMap {
  std::uint8_t* base;
  std::uint64_t page_stride;
  std::uint64_t page_bytes;
  std::uint64_t n_pages;
  std::uint8_t* page(std::uint64_t index) const noexcept { return base + index * page_stride; }
};

struct PoolMap {
  std::vector<std::vector<RegionMap>> groups;
};

// One slice of a leg: geometry.SLICE_DTYPE, 64 bytes, as it travels in RESERVE.
struct Slice {
  std::uint32_t group, region, slice, src_group, src_region, runs;
  std::uint64_t run_bytes, src_offset, src_stride, dst_offset, dst_stride;
  std::uint64_t chunk_bytes() const noexcept { return runs * run_bytes; }
};
static_assert(sizeof(Slice) == 64);

}  // namespace kvxfer
