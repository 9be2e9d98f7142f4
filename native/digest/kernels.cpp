#include "digest/kernels.hpp"

#include <atomic>
#include <bit>
#include <cstring>

namespace kvxfer::digest {

static_assert(std::endian::native == std::endian::little, "words are loaded as they lie in memory");

// XXH3's default secret.
alignas(64) const unsigned char kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

namespace {

std::uint64_t word(const unsigned char* p) noexcept {
  std::uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

void read(std::uint64_t* acc, const unsigned char* src, std::size_t stripes, unsigned first) noexcept {
  for (; stripes > 0; --stripes, src += kStripe) {
    for (unsigned lane = 0; lane < 8; ++lane) {
      const std::uint64_t value = word(src + 8 * lane);
      const std::uint64_t keyed = value ^ word(kSecret + 8 * (first + lane));
      acc[lane ^ 1] += value;
      acc[lane] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
    if (++first < kStripesPerBlock) continue;
    first = 0;
    for (unsigned lane = 0; lane < 8; ++lane) {
      acc[lane] = (acc[lane] ^ (acc[lane] >> 47) ^ word(kSecret + kSecretBytes - kStripe + 8 * lane)) * kPrime32_1;
    }
  }
}

// A block at a time, so that it is still in the first-level cache when it is hashed. What was stored is hashed: the source
// may change in between. (A shifted destination comes with a source of our own, see kernels.hpp.)
void stream(std::uint64_t* acc, unsigned char* dst, const unsigned char* src, std::size_t stripes, unsigned first,
            std::size_t shift) noexcept {
  while (stripes > 0) {
    const std::size_t room = kStripesPerBlock - first;
    const std::size_t taken = stripes < room ? stripes : room;
    std::memcpy(dst + shift, src + shift, taken * kStripe);
    read(acc, shift == 0 ? dst : src, taken, first);
    src += taken * kStripe;
    dst += taken * kStripe;
    stripes -= taken;
    first = 0;
  }
}

void copy(std::uint64_t* acc, unsigned char* dst, const unsigned char* src, std::size_t stripes,
          unsigned first) noexcept {
  stream(acc, dst, src, stripes, first, 0);
}

const Kernels* best() noexcept {
  for (const Kernels* k : {avx512_kernels(), avx2_kernels(), neon_kernels()}) {
    if (k != nullptr) return k;
  }
  return &kScalarKernels;
}

std::atomic<const Kernels*>& active() noexcept {
  static std::atomic<const Kernels*> chosen{best()};
  return chosen;
}

}  // namespace

const Kernels kScalarKernels{"scalar", read, copy, stream};

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found;
  for (const Kernels* k : {avx512_kernels(), avx2_kernels(), neon_kernels()}) {
    if (k != nullptr) found.push_back(k);
  }
  found.push_back(&kScalarKernels);
  return found;
}

const Kernels& active_kernels() noexcept { return *active().load(std::memory_order_relaxed); }
void use_kernels(const Kernels& kernels) noexcept { active().store(&kernels, std::memory_order_relaxed); }

}  // namespace kvxfer::digest
