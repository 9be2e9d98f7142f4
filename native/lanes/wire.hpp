// What the two cores say to each other on a local or tcp lane, after the connection has been authenticated.
// Everything is little-endian. Sizes are checked by whoever reads: nothing here is trusted.
#pragma once

#include <cstdint>

namespace kvxfer::wire {

inline constexpr std::uint32_t kMagic = 0x4658564B;  // "KVXF"

enum class FrameType : std::uint16_t {
  kWrite = 1,    // chunks of one slice for a run of pages
  kRecord = 2,   // a commit or progress record (record.hpp)
  kConfirm = 3,  // receiver to sender, local lanes only: a record was processed, its sources are no longer read
};

struct FrameHeader {
  std::uint32_t magic;
  std::uint16_t type;
  std::uint16_t flags;
  std::uint32_t generation;
  std::uint32_t lane;
  std::uint64_t sequence;  // per lane and direction, from 0, without gaps
  std::uint64_t reservation;
  std::uint32_t leg;
  std::uint32_t group;       // decode's group index
  std::uint32_t slice;       // ordinal of the slice among the leg's slices of this group, not its shard unit
  std::uint32_t n_pages;     // length of the run
  std::uint64_t page_first;  // index of the run's first page in the reservation's page list of the group
  std::uint64_t body_bytes;  // bytes that follow the header
};
static_assert(sizeof(FrameHeader) == 64);

// Body of kWrite on tcp: n_pages chunks back to back, each runs * run_bytes bytes.
// Body of kWrite on local: SourceRef, then n_pages u64 pool pages of prefill.
// Body of kRecord on tcp: the record. On local: SourceRef, then the record.
struct SourceRef {
  std::uint64_t slot;      // index into the generation table
  std::uint64_t expected;  // the slot's value while the sources are pinned; any other value: they may have been reused
};
static_assert(sizeof(SourceRef) == 16);

// A kWrite frame never carries more than one chunk beyond this many bytes, nor more pages than kMaxPagesPerFrame.
inline constexpr std::uint64_t kFrameBytes = 1u << 20;
inline constexpr std::uint32_t kMaxPagesPerFrame = 4096;

}  // namespace kvxfer::wire
