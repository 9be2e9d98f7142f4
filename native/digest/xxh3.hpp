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

// For many chunks in a row, up to twice as fast for chunks of a few KiB: the caller issues one store_fence() behind
// them, before it releases a lock or publishes a flag that says they are there or that nothing more will land.
std::uint64_t copy_xxh3_64_unfenced(void* dst, const void* src, std::size_t n) noexcept;
void store_fence() noexcept;

// Starts to fetch a chunk that will be read next: the hardware cannot guess where a scattered one begins.
inline void prefetch(const void* src, std::size_t n) noexcept {
  for (std::size_t at = 0; at < n && at < 768; at += 64) __builtin_prefetch(static_cast<const char*>(src) + at);
}

// Incremental; update sizes are arbitrary. Fast when each update is a multiple of 64 bytes (best: of 1,024).
class Hasher {
 public:
  Hasher() noexcept { reset(); }
  void reset() noexcept;
  void update(const void* data, std::size_t n) noexcept;
  // The same, and copies the bytes to dst on the way. The unfenced form is for many runs in a row: see above.
  void copy_update(void* dst, const void* src, std::size_t n) noexcept;
  void copy_update_unfenced(void* dst, const void* src, std::size_t n) noexcept;
  std::uint64_t digest() const noexcept;

 private:
  template <bool copying>
  void feed(unsigned char* dst, const unsigned char* src, std::size_t n, std::size_t stream_from) noexcept;

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
