#include "digest/kernels.hpp"

#if defined(__x86_64__)

// GCC 12's intrinsics leave don't-care operands uninitialised on purpose and then warn about them (its bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

namespace kvxfer::digest {
namespace {

namespace avx512 {

#define KVX_TARGET __attribute__((target("avx512f")))
inline constexpr std::size_t kPrefetchBytes = 4096;

struct Sums {
  __m512i products, words, last;
  KVX_TARGET Sums() noexcept : products(_mm512_setzero_si512()), words(products), last(products) {}
  KVX_TARGET void add(const unsigned char* stripe, const unsigned char* secret) noexcept {
    last = _mm512_loadu_si512(stripe);
    __asm__("" : "+v"(last));  // one load: the compiler must not fetch a source that may change a second time
    const __m512i keyed = _mm512_xor_si512(last, _mm512_loadu_si512(secret));
    products = _mm512_add_epi64(products, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
    words = _mm512_add_epi64(words, last);
  }
  KVX_TARGET void store(unsigned char* dst) const noexcept { _mm512_storeu_si512(dst, last); }
  KVX_TARGET void stream(unsigned char* dst) const noexcept {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), last);
  }
};

struct Acc {
  __m512i v;
  KVX_TARGET explicit Acc(const std::uint64_t* memory) noexcept : v(_mm512_loadu_si512(memory)) {}
  KVX_TARGET void store(std::uint64_t* memory) const noexcept { _mm512_storeu_si512(memory, v); }
  // Each word goes to its neighbour's accumulator: one swap of the sum does for all stripes.
  KVX_TARGET void add(const Sums& sums) noexcept {
    v = _mm512_add_epi64(v, sums.products);
    v = _mm512_add_epi64(v, _mm512_shuffle_epi32(sums.words, _MM_PERM_BADC));
  }
  KVX_TARGET void scramble() noexcept {
    const __m512i prime = _mm512_set1_epi32(static_cast<int>(kPrime32_1));
    const __m512i key = _mm512_loadu_si512(kSecret + kSecretBytes - kStripe);
    v = _mm512_xor_si512(_mm512_xor_si512(v, _mm512_srli_epi64(v, 47)), key);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), prime);
    v = _mm512_add_epi64(_mm512_mul_epu32(v, prime), _mm512_slli_epi64(high, 32));
  }
};

KVX_TARGET inline void stream_copy(unsigned char* dst, const unsigned char* src) noexcept {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}

#include "digest/kernel.inl"
#undef KVX_TARGET

}  // namespace avx512

namespace avx2 {

#define KVX_TARGET __attribute__((target("avx2")))
inline constexpr std::size_t kPrefetchBytes = 4096;

KVX_TARGET inline __m256i load(const void* p) noexcept { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

struct Sums {
  __m256i products[2], words[2], last[2];
  KVX_TARGET Sums() noexcept {
    for (int h = 0; h < 2; ++h) products[h] = words[h] = last[h] = _mm256_setzero_si256();
  }
  KVX_TARGET void add(const unsigned char* stripe, const unsigned char* secret) noexcept {
    for (int h = 0; h < 2; ++h) {
      last[h] = load(stripe + 32 * h);
      __asm__("" : "+x"(last[h]));  // one load, as above
      const __m256i keyed = _mm256_xor_si256(last[h], load(secret + 32 * h));
      products[h] = _mm256_add_epi64(products[h], _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
      words[h] = _mm256_add_epi64(words[h], last[h]);
    }
  }
  KVX_TARGET void store(unsigned char* dst) const noexcept {
    for (int h = 0; h < 2; ++h) _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 32 * h), last[h]);
  }
  KVX_TARGET void stream(unsigned char* dst) const noexcept {
    for (int h = 0; h < 2; ++h) _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32 * h), last[h]);
  }
};

struct Acc {
  __m256i v[2];
  KVX_TARGET explicit Acc(const std::uint64_t* memory) noexcept {
    for (int h = 0; h < 2; ++h) v[h] = load(memory + 4 * h);
  }
  KVX_TARGET void store(std::uint64_t* memory) const noexcept {
    for (int h = 0; h < 2; ++h) _mm256_storeu_si256(reinterpret_cast<__m256i*>(memory + 4 * h), v[h]);
  }
  KVX_TARGET void add(const Sums& sums) noexcept {
    for (int h = 0; h < 2; ++h) {
      v[h] = _mm256_add_epi64(v[h], sums.products[h]);
      v[h] = _mm256_add_epi64(v[h], _mm256_shuffle_epi32(sums.words[h], _MM_SHUFFLE(1, 0, 3, 2)));
    }
  }
  KVX_TARGET void scramble() noexcept {
    const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
    for (int h = 0; h < 2; ++h) {
      const __m256i key = load(kSecret + kSecretBytes - kStripe + 32 * h);
      v[h] = _mm256_xor_si256(_mm256_xor_si256(v[h], _mm256_srli_epi64(v[h], 47)), key);
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(v[h], 32), prime);
      v[h] = _mm256_add_epi64(_mm256_mul_epu32(v[h], prime), _mm256_slli_epi64(high, 32));
    }
  }
};

KVX_TARGET inline void stream_copy(unsigned char* dst, const unsigned char* src) noexcept {
  for (int h = 0; h < 2; ++h) _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32 * h), load(src + 32 * h));
}

#include "digest/kernel.inl"
#undef KVX_TARGET

}  // namespace avx2

constexpr Kernels kAvx512{"avx512", avx512::read, avx512::copy, avx512::stream};
constexpr Kernels kAvx2{"avx2", avx2::read, avx2::copy, avx2::stream};

}  // namespace

const Kernels* avx512_kernels() noexcept { return __builtin_cpu_supports("avx512f") ? &kAvx512 : nullptr; }
const Kernels* avx2_kernels() noexcept { return __builtin_cpu_supports("avx2") ? &kAvx2 : nullptr; }

}  // namespace kvxfer::digest

#else

namespace kvxfer::digest {

const Kernels* avx512_kernels() noexcept { return nullptr; }
const Kernels* avx2_kernels() noexcept { return nullptr; }

}  // namespace kvxfer::digest

#endif
