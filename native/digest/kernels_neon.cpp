#include "digest/kernels.hpp"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace kvxfer::digest {
namespace {

#define KVX_TARGET
inline constexpr std::size_t kPrefetchBytes = 4096;

inline uint64x2_t load(const void* p) noexcept {
  return vreinterpretq_u64_u8(vld1q_u8(static_cast<const std::uint8_t*>(p)));
}

struct Sums {
  uint64x2_t products[4], words[4], last[4];
  Sums() noexcept {
    for (int q = 0; q < 4; ++q) products[q] = words[q] = last[q] = vdupq_n_u64(0);
  }
  void add(const unsigned char* stripe, const unsigned char* secret) noexcept {
    for (int q = 0; q < 4; ++q) {
      last[q] = load(stripe + 16 * q);
      const uint64x2_t keyed = veorq_u64(last[q], load(secret + 16 * q));
      products[q] = vmlal_u32(products[q], vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
      words[q] = vaddq_u64(words[q], last[q]);
    }
  }
  void store(unsigned char* dst) const noexcept {
    for (int q = 0; q < 4; ++q) vst1q_u8(dst + 16 * q, vreinterpretq_u8_u64(last[q]));
  }
  // AArch64 has no store that skips the caches and needs no more than this: full lines written in order are enough.
  void stream(unsigned char* dst) const noexcept { store(dst); }
};

struct Acc {
  uint64x2_t v[4];
  explicit Acc(const std::uint64_t* memory) noexcept {
    for (int q = 0; q < 4; ++q) v[q] = vld1q_u64(memory + 2 * q);
  }
  void store(std::uint64_t* memory) const noexcept {
    for (int q = 0; q < 4; ++q) vst1q_u64(memory + 2 * q, v[q]);
  }
  void add(const Sums& sums) noexcept {
    for (int q = 0; q < 4; ++q) {
      v[q] = vaddq_u64(vaddq_u64(v[q], sums.products[q]), vextq_u64(sums.words[q], sums.words[q], 1));
    }
  }
  void scramble() noexcept {
    const uint32x2_t prime = vdup_n_u32(static_cast<std::uint32_t>(kPrime32_1));
    for (int q = 0; q < 4; ++q) {
      const uint64x2_t key = load(kSecret + kSecretBytes - kStripe + 16 * q);
      v[q] = veorq_u64(veorq_u64(v[q], vshrq_n_u64(v[q], 47)), key);
      const uint64x2_t high = vmull_u32(vshrn_n_u64(v[q], 32), prime);
      v[q] = vmlal_u32(vshlq_n_u64(high, 32), vmovn_u64(v[q]), prime);
    }
  }
};

inline void stream_copy(unsigned char* dst, const unsigned char* src) noexcept {
  for (int q = 0; q < 4; ++q) vst1q_u8(dst + 16 * q, vld1q_u8(src + 16 * q));
}

#include "digest/kernel.inl"
#undef KVX_TARGET

constexpr Kernels kNeon{"neon", read, copy, stream};

}  // namespace

const Kernels* neon_kernels() noexcept { return &kNeon; }

}  // namespace kvxfer::digest

#else

namespace kvxfer::digest {

const Kernels* neon_kernels() noexcept { return nullptr; }

}  // namespace kvxfer::digest

#endif
