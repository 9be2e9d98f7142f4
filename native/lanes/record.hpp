// The commit record: the last thing prefill puts on each lane of a leg. Built by the sender's core from what it posted.
// Layout (little-endian), in this order:
//   RecordHeader
//   RecordGroup[n_groups]            token range of each of the leg's groups, by group index
//   bitmap, (n_chunks + 7) / 8 bytes, zero-padded to a multiple of 8: chunks posted on this lane, bit k of byte k/8 is 1 << k%8
//   u64 folds[n_folds]               on the leg's first lane under verify="digest", else none
//   aux, aux_bytes bytes, zero-padded to a multiple of 8
//   u64 digest                       XXH3-64 of all bytes before it
// Chunk ordinals and folds, for a leg whose groups (those with at least one slice) are taken in order of group index:
//   ordinal(g, page index k, slice ordinal s) = base(g) + k * n_slices(g) + s,    base = sum over earlier groups of pages * slices
//   pages_per_fold(g) = max(1, 64 / tokens_per_page(g)), or 1 where tokens_per_page is 0
//   fold f of g covers page indices [f * pages_per_fold, (f + 1) * pages_per_fold): XXH3-64 over the bound digests of its
//   chunks in ordinal order, each 8 bytes little-endian. Folds of all groups follow each other. A fold with a chunk that was
//   not posted (sender) or has not landed (receiver) is 0.
#pragma once

#include <cstdint>

namespace kvxfer::record {

inline constexpr std::uint32_t kMagic = 0x5258564B;  // "KVXR"
inline constexpr std::uint16_t kVersion = 1;
enum class Kind : std::uint16_t { kCommit = 1, kProgress = 2 };
inline constexpr std::uint32_t kFlagFolds = 1;
inline constexpr std::uint32_t kFlagAux = 2;

struct RecordHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t kind;
  std::uint64_t reservation;
  std::uint8_t epoch[16];
  std::uint32_t generation;
  std::uint32_t leg;
  std::uint32_t lane;
  std::uint32_t n_lanes;  // of the leg's lane set
  std::uint32_t n_groups;
  std::uint32_t flags;
  std::uint64_t n_chunks;  // of the leg: the bitmap's length in bits
  std::uint64_t n_posted;  // bits set in this bitmap
  std::uint64_t n_folds;
  std::uint64_t n_tokens;  // of the commit, counted from token 0
  std::uint64_t aux_bytes;
};
static_assert(sizeof(RecordHeader) == 96);

struct RecordGroup {
  std::uint32_t group;
  std::uint32_t reserved;
  std::uint64_t first_token;
  std::uint64_t n_tokens;  // n_tokens of the commit minus first_token, 0 if that is negative
};
static_assert(sizeof(RecordGroup) == 24);

}  // namespace kvxfer::record
