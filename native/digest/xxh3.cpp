#include "digest/xxh3.hpp"

#include <bit>
#include <cstring>

#include "digest/kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvxfer::digest {

namespace {

using Bytes = const unsigned char*;

constexpr std::uint64_t kPrime32_2 = 0x85EBCA77U;
constexpr std::uint64_t kPrime32_3 = 0xC2B2AE3DU;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87U;
constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4FU;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9U;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63U;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5U;
constexpr std::uint64_t kMixShort = 0x9FB21C651E98DF25U;
constexpr std::uint64_t kMixLong = 0x165667919E3779F9U;

constexpr std::size_t kShortBytes = 240;  // up to here XXH3 does without accumulators

// From here on a copy streams past the caches. Where each copy is fenced, the fence eats the gain of shorter ones.
constexpr std::size_t kStreamBytes = 256;
constexpr std::size_t kStreamBytesFenced = 1024;

std::uint64_t u64(Bytes p) noexcept {
  std::uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

std::uint32_t u32(Bytes p) noexcept {
  std::uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

std::uint64_t fold_product(std::uint64_t a, std::uint64_t b) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t avalanche(std::uint64_t h) noexcept {
  h = (h ^ (h >> 37)) * kMixLong;
  return h ^ (h >> 32);
}

// XXH64's finish, which XXH3 keeps for the shortest inputs.
std::uint64_t avalanche_tiny(std::uint64_t h) noexcept {
  h = (h ^ (h >> 33)) * kPrime64_2;
  h = (h ^ (h >> 29)) * kPrime64_3;
  return h ^ (h >> 32);
}

std::uint64_t mix16(Bytes p, std::size_t secret) noexcept {
  return fold_product(u64(p) ^ u64(kSecret + secret), u64(p + 8) ^ u64(kSecret + secret + 8));
}

std::uint64_t hash_0_to_16(Bytes p, std::size_t n) noexcept {
  if (n > 8) {
    const std::uint64_t low = u64(p) ^ u64(kSecret + 24) ^ u64(kSecret + 32);
    const std::uint64_t high = u64(p + n - 8) ^ u64(kSecret + 40) ^ u64(kSecret + 48);
    return avalanche(n + __builtin_bswap64(low) + high + fold_product(low, high));
  }
  if (n >= 4) {
    const std::uint64_t both = u32(p + n - 4) + (static_cast<std::uint64_t>(u32(p)) << 32);
    std::uint64_t h = both ^ u64(kSecret + 8) ^ u64(kSecret + 16);
    h = (h ^ std::rotl(h, 49) ^ std::rotl(h, 24)) * kMixShort;
    h = (h ^ ((h >> 35) + n)) * kMixShort;
    return h ^ (h >> 28);
  }
  if (n > 0) {
    const std::uint32_t combined = static_cast<std::uint32_t>(p[0]) << 16 | static_cast<std::uint32_t>(p[n / 2]) << 24 |
                                   p[n - 1] | static_cast<std::uint32_t>(n) << 8;
    return avalanche_tiny(combined ^ static_cast<std::uint64_t>(u32(kSecret) ^ u32(kSecret + 4)));
  }
  return avalanche_tiny(u64(kSecret + 56) ^ u64(kSecret + 64));
}

std::uint64_t hash_17_to_128(Bytes p, std::size_t n) noexcept {
  std::uint64_t h = n * kPrime64_1;
  // From both ends towards the middle, 16 bytes each, as far as the input reaches.
  for (std::size_t i = (n - 1) / 32 + 1; i-- > 0;) {
    h += mix16(p + 16 * i, 32 * i) + mix16(p + n - 16 * (i + 1), 32 * i + 16);
  }
  return avalanche(h);
}

std::uint64_t hash_129_to_240(Bytes p, std::size_t n) noexcept {
  std::uint64_t h = n * kPrime64_1;
  for (std::size_t i = 0; i < 8; ++i) h += mix16(p + 16 * i, 16 * i);
  h = avalanche(h);
  for (std::size_t i = 8; i < n / 16; ++i) h += mix16(p + 16 * i, 16 * (i - 8) + 3);
  h += mix16(p + n - 16, 136 - 17);
  return avalanche(h);
}

std::uint64_t hash_short(Bytes p, std::size_t n) noexcept {
  if (n <= 16) return hash_0_to_16(p, n);
  if (n <= 128) return hash_17_to_128(p, n);
  return hash_129_to_240(p, n);
}

void begin(std::uint64_t* acc) noexcept {
  constexpr std::uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                       kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  std::memcpy(acc, kStart, sizeof kStart);
}

// Takes in the input's last 64 bytes, which may overlap what acc has seen, and reduces.
std::uint64_t finish(std::uint64_t* acc, Bytes last, std::uint64_t total) noexcept {
  constexpr std::size_t kLastKey = kSecretBytes - kStripe - 7;
  for (unsigned i = 0; i < 8; ++i) {
    const std::uint64_t value = u64(last + 8 * i);
    const std::uint64_t keyed = value ^ u64(kSecret + kLastKey + 8 * i);
    acc[i ^ 1] += value;
    acc[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
  }
  std::uint64_t h = total * kPrime64_1;
  for (unsigned i = 0; i < 4; ++i) {
    h += fold_product(acc[2 * i] ^ u64(kSecret + 11 + 16 * i), acc[2 * i + 1] ^ u64(kSecret + 11 + 16 * i + 8));
  }
  return avalanche(h);
}

// The same as kernels.stream for a dst that is not aligned to a stripe. What is stored and what is hashed are then loaded
// at different offsets, so the source goes through a stage: it may change under us, and is read once.
void stream_staged(const Kernels& kernels, std::uint64_t* acc, unsigned char* dst, Bytes src, std::size_t stripes,
                   unsigned first, std::size_t shift) noexcept {
  constexpr std::size_t kStageStripes = 64;
  alignas(kStripe) unsigned char stage[kStageStripes * kStripe];
  while (stripes > 0) {
    const std::size_t taken = stripes < kStageStripes ? stripes : kStageStripes;
    const std::size_t bytes = taken * kStripe;
    std::memcpy(stage, src, bytes);
    std::memcpy(dst, stage, shift);
    kernels.stream(acc, dst, stage, taken - 1, first, shift);
    kernels.read(acc, stage + bytes - kStripe, 1, (first + taken - 1) % kStripesPerBlock);
    const std::size_t streamed = shift + (taken - 1) * kStripe;
    std::memcpy(dst + streamed, stage + streamed, bytes - streamed);
    first = (first + taken) % kStripesPerBlock;
    src += bytes;
    dst += bytes;
    stripes -= taken;
  }
}

// Accumulates the stripes of [src, src + n), all but its last 1 to 64 bytes, and copies all n bytes. Every byte of src
// is read once: what is hashed is what is stored. `last` receives the last stripe accumulated, if any, at 0, and the
// rest at 64. Returns how many stripes there are.
std::size_t copy_stripes(const Kernels& kernels, std::uint64_t* acc, unsigned char* dst, Bytes src, std::size_t n,
                         unsigned first, std::size_t stream_from, unsigned char* last) noexcept {
  const std::size_t stripes = (n - 1) / kStripe;
  const std::size_t rest = n - stripes * kStripe;
  if (stripes == 0) {
    std::memcpy(last + kStripe, src, rest);
  } else {
    const std::size_t body = stripes - 1;
    const std::size_t shift = -reinterpret_cast<std::uintptr_t>(dst) % kStripe;
    if (n < stream_from) {
      kernels.copy(acc, dst, src, body, first);
    } else if (shift == 0) {
      kernels.stream(acc, dst, src, body, first, 0);
    } else {
      stream_staged(kernels, acc, dst, src, body, first, shift);
    }
    std::memcpy(last, src + body * kStripe, kStripe + rest);
    kernels.copy(acc, dst + body * kStripe, last, 1, (first + body) % kStripesPerBlock);
  }
  std::memcpy(dst + stripes * kStripe, last + kStripe, rest);
  return stripes;
}

std::uint64_t copy_and_hash(unsigned char* dst, Bytes src, std::size_t n, std::size_t stream_from) noexcept {
  if (n <= kShortBytes) {
    if (n > 0) std::memcpy(dst, src, n);
    return hash_short(dst, n);
  }
  alignas(64) std::uint64_t acc[8];
  begin(acc);
  unsigned char last[2 * kStripe];
  const std::size_t stripes = copy_stripes(active_kernels(), acc, dst, src, n, 0, stream_from, last);
  return finish(acc, last + (n - stripes * kStripe), n);
}

}  // namespace

void store_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();  // streaming stores are not ordered by the release stores that publish them
#endif
}

std::uint64_t xxh3_64(const void* data, std::size_t n) noexcept {
  const auto src = static_cast<Bytes>(data);
  if (n <= kShortBytes) return hash_short(src, n);
  alignas(64) std::uint64_t acc[8];
  begin(acc);
  active_kernels().read(acc, src, (n - 1) / kStripe, 0);
  return finish(acc, src + n - kStripe, n);
}

std::uint64_t copy_xxh3_64(void* dst, const void* src, std::size_t n) noexcept {
  const std::uint64_t digest =
      copy_and_hash(static_cast<unsigned char*>(dst), static_cast<Bytes>(src), n, kStreamBytesFenced);
  if (n >= kStreamBytesFenced) store_fence();
  return digest;
}

std::uint64_t copy_xxh3_64_unfenced(void* dst, const void* src, std::size_t n) noexcept {
  return copy_and_hash(static_cast<unsigned char*>(dst), static_cast<Bytes>(src), n, kStreamBytes);
}

void Hasher::reset() noexcept {
  begin(acc_);
  tail_bytes_ = 0;
  total_bytes_ = 0;
}

template <bool copying>
void Hasher::feed(unsigned char* dst, const unsigned char* src, std::size_t n, std::size_t stream_from) noexcept {
  const Kernels& kernels = active_kernels();
  // Moves the next `taken` input bytes to `to` in the tail.
  const auto buffer = [&](std::size_t to, std::size_t taken) {
    std::memcpy(tail_ + to, src, taken);
    if constexpr (copying) {
      std::memcpy(dst, tail_ + to, taken);
      dst += taken;
    }
    src += taken;
    n -= taken;
    total_bytes_ += taken;
  };

  if (n == 0) return;
  if (total_bytes_ + n <= kShortBytes) return buffer(total_bytes_, n);

  if (total_bytes_ > 0 && total_bytes_ <= kShortBytes) {
    const std::size_t room = sizeof tail_ - total_bytes_;
    buffer(total_bytes_, n < room ? n : room);
    kernels.read(acc_, tail_, 3, 0);
    tail_bytes_ = total_bytes_ - 3 * kStripe;
    std::memmove(tail_, tail_ + 2 * kStripe, kStripe + tail_bytes_);
  }
  if (total_bytes_ > 0) {
    const std::size_t room = kStripe - tail_bytes_;
    const std::size_t taken = n < room ? n : room;
    buffer(kStripe + tail_bytes_, taken);
    tail_bytes_ += taken;
    if (n == 0) return;
    kernels.read(acc_, tail_ + kStripe, 1, (total_bytes_ / kStripe - 1) % kStripesPerBlock);
    std::memcpy(tail_, tail_ + kStripe, kStripe);
  }

  const unsigned first = (total_bytes_ / kStripe) % kStripesPerBlock;
  if constexpr (copying) {
    const std::size_t stripes = copy_stripes(kernels, acc_, dst, src, n, first, stream_from, tail_);
    tail_bytes_ = n - stripes * kStripe;
  } else {
    const std::size_t stripes = (n - 1) / kStripe;
    kernels.read(acc_, src, stripes, first);
    tail_bytes_ = n - stripes * kStripe;
    if (stripes > 0) {
      std::memcpy(tail_, src + (stripes - 1) * kStripe, kStripe + tail_bytes_);
    } else {
      std::memcpy(tail_ + kStripe, src, tail_bytes_);
    }
  }
  total_bytes_ += n;
}

void Hasher::update(const void* data, std::size_t n) noexcept { feed<false>(nullptr, static_cast<Bytes>(data), n, 0); }

void Hasher::copy_update(void* dst, const void* src, std::size_t n) noexcept {
  feed<true>(static_cast<unsigned char*>(dst), static_cast<Bytes>(src), n, kStreamBytesFenced);
  if (n >= kStreamBytesFenced) store_fence();
}

void Hasher::copy_update_unfenced(void* dst, const void* src, std::size_t n) noexcept {
  feed<true>(static_cast<unsigned char*>(dst), static_cast<Bytes>(src), n, kStreamBytes);
}

std::uint64_t Hasher::digest() const noexcept {
  if (total_bytes_ <= kShortBytes) return hash_short(tail_, total_bytes_);
  alignas(64) std::uint64_t acc[8];
  std::memcpy(acc, acc_, sizeof acc);
  return finish(acc, tail_ + tail_bytes_, total_bytes_);
}

std::uint64_t bind(std::uint64_t content, const BindKey& key, std::uint32_t group, std::uint32_t region,
                   std::uint32_t slice, std::uint64_t logical) noexcept {
  unsigned char bytes[64] = {};
  std::memcpy(bytes, &content, 8);
  std::memcpy(bytes + 8, &key.reservation, 8);
  std::memcpy(bytes + 16, key.epoch, 16);
  std::memcpy(bytes + 32, &key.leg, 4);
  std::memcpy(bytes + 36, &group, 4);
  std::memcpy(bytes + 40, &region, 4);
  std::memcpy(bytes + 44, &slice, 4);
  std::memcpy(bytes + 48, &logical, 8);
  return hash_17_to_128(bytes, sizeof bytes);
}

const char* isa() noexcept { return active_kernels().name; }

}  // namespace kvxfer::digest
