// A copy that leaves the cache alone, for bytes that nobody here will read again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kvxfer {

// memcpy with streaming stores; digest::store_fence() must follow before anybody is told of the bytes. The C library
// streams only copies that would fill the last level cache, and a page is far smaller.
inline void copy_streaming(std::uint8_t* to, const std::uint8_t* from, std::size_t n) noexcept {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kAhead = 512;  // the hardware cannot guess where a scattered page begins, nor cross 4 KiB
  if (n >= 1024) {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLine;
    std::memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= kLine; to += kLine, from += kLine, n -= kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
      __m128i part[4];
      for (int i = 0; i < 4; ++i) part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
      for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, part[i]);
    }
  }
#endif
  std::memcpy(to, from, n);
}

}  // namespace kvxfer
