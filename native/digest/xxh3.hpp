// XXH3-64 (seed 0, default secret), bit-identical to the xxhash package, also fused with a copy. No allocation, no
// locks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::digest {

std::uint64_t xxh3_64(const void* data, std::size_t n) noexcept;

// Copies n bytes (regions do not overlap) and returns the XXH3-64 of what was stored: one pass, streaming stores where
// the destination allows it; a store fence has been issued when it returns.
std::uint64_t copy_xxh3_64(void* dst, const void* src, std::size_t n) noexcept;

// Incremental; update sizes are arbitrary. Fast when each update is a multiple of 64 bytes (best: of 1,024).
// copy_update ends with a store fence, too.
class Hasher {
 public:
  Hasher() noexcept { reset(); }
  void reset() noexcept;
  void update(const void* data, std::size_t n) noexcept;
  // The same, and copies the bytes to dst on the way.
  void copy_update(void* dst, const void* src, std::size_t n) noexcept;
  std::uint64_t digest() const noexcept;

 private:
  template <bool copying>
  void feed(unsigned char* dst, const unsigned char* src, std::size_t n) noexcept;

  alignas(64) std::uint64_t acc_[8];
  // Up to 240 bytes: all of the input. Beyond: the 64 bytes accumulated last, then the 1 to 64 that are not yet.
  alignas(64) unsigned char tail_[256];
  std::size_t tail_bytes_;  // of those not yet accumulated
  std::uint64_t total_bytes_;
};

struct BindKey {
  std::uint64_t reservation;
  std::uint8_t epoch[16];
  std::uint32_t leg;
};
// XXH3-64 of 64 bytes: content, reservation, epoch, leg, group, region, slice, logical, eight zero bytes.
std::uint64_t bind(std::uint64_t content, const BindKey& key, std::uint32_t group, std::uint32_t region,
                   std::uint32_t slice, std::uint64_t logical) noexcept;

const char* isa() noexcept;

}  // namespace kvxfer::digest
