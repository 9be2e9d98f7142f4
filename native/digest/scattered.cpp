#include "digest/scattered.hpp"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "digest/xxh3.hpp"

namespace kvxfer::digest {

namespace {

const void* at(std::uint64_t address) noexcept { return reinterpret_cast<const void*>(address); }
void* at_mutable(std::uint64_t address) noexcept { return reinterpret_cast<void*>(address); }

// Calls work(begin, end) for `threads` equal parts of [0, n), the first in this thread.
template <typename Work>
void in_parts(std::size_t n, unsigned threads, const Work& work) noexcept {
  const std::size_t parts = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(1, n));
  const auto bound = [n, parts](std::size_t part) { return n / parts * part + std::min(part, n % parts); };
  std::vector<std::thread> helpers;
  std::size_t part = 1;
  try {
    for (; part < parts; ++part) helpers.emplace_back(work, bound(part), bound(part + 1));
  } catch (const std::exception&) {
    work(bound(part), n);  // no more threads to be had
  }
  work(0, bound(1));
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

void digest_scattered(const std::uint64_t* ptrs, std::size_t n, std::size_t chunk_bytes, unsigned threads,
                      std::uint64_t* out) noexcept {
  in_parts(n, threads, [=](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      if (i + 1 < end) prefetch(at(ptrs[i + 1]), chunk_bytes);
      out[i] = xxh3_64(at(ptrs[i]), chunk_bytes);
    }
  });
}

void digest_strided(const std::uint64_t* ptrs, std::size_t n, std::size_t runs, std::size_t run_bytes,
                    std::size_t stride, std::uint64_t* out) noexcept {
  if (runs == 1 || run_bytes == stride) return digest_scattered(ptrs, n, runs * run_bytes, 1, out);
  Hasher hasher;
  for (std::size_t i = 0; i < n; ++i) {
    hasher.reset();
    for (std::size_t run = 0; run < runs; ++run) hasher.update(at(ptrs[i] + run * stride), run_bytes);
    out[i] = hasher.digest();
  }
}

void copy_scattered(const std::uint64_t* dst, const std::uint64_t* src, std::size_t n, std::size_t chunk_bytes,
                    unsigned threads) noexcept {
  if (chunk_bytes == 0) return;
  in_parts(n, threads, [=](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) std::memcpy(at_mutable(dst[i]), at(src[i]), chunk_bytes);
  });
}

void copy_digest_scattered(const std::uint64_t* dst, const std::uint64_t* src, std::size_t n, std::size_t chunk_bytes,
                           unsigned threads, std::uint64_t* out) noexcept {
  in_parts(n, threads, [=](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      if (i + 1 < end) prefetch(at(src[i + 1]), chunk_bytes);
      out[i] = copy_xxh3_64_unfenced(at_mutable(dst[i]), at(src[i]), chunk_bytes);
    }
    store_fence();
  });
}

}  // namespace kvxfer::digest
