// The inner loop of XXH3-64 for each instruction set, chosen at run time by what the CPU has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvxfer::digest {

inline constexpr std::size_t kStripe = 64;        // bytes accumulated at a time
inline constexpr unsigned kStripesPerBlock = 16;  // between two scrambles, with the default secret
inline constexpr std::size_t kSecretBytes = 192;
extern const unsigned char kSecret[kSecretBytes];

inline constexpr std::uint64_t kPrime32_1 = 0x9E3779B1U;

// Each takes `stripes` stripes at src into acc, the first of them being number `first` (0..15) of its block, and
// scrambles after number 15. The caller leaves out the input's last 1 to 64 bytes, so a block is scrambled only if more
// follows.
struct Kernels {
  const char* name;
  void (*read)(std::uint64_t* acc, const unsigned char* src, std::size_t stripes, unsigned first) noexcept;
  // Also copies the stripes to dst. src is read once: what is hashed is what is stored.
  void (*copy)(std::uint64_t* acc, unsigned char* dst, const unsigned char* src, std::size_t stripes,
               unsigned first) noexcept;
  // The same past the caches, for a dst that is `shift` bytes (0..63) short of 64-byte alignment: what is copied is
  // [shift, shift + 64 * stripes) of src, and with a shift src is read twice, so it must not change. No store fence.
  void (*stream)(std::uint64_t* acc, unsigned char* dst, const unsigned char* src, std::size_t stripes, unsigned first,
                 std::size_t shift) noexcept;
};

extern const Kernels kScalarKernels;
// nullptr where the compiler's target or the CPU lacks the instructions.
const Kernels* avx2_kernels() noexcept;
const Kernels* avx512_kernels() noexcept;
const Kernels* neon_kernels() noexcept;

// All that this CPU runs, best first; never empty.
std::vector<const Kernels*> available_kernels();
const Kernels& active_kernels() noexcept;
// For tests and measurements: results do not change, only their speed.
void use_kernels(const Kernels& kernels) noexcept;

}  // namespace kvxfer::digest
