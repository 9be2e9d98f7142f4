// Many chunks in one call, by several threads. Pointers are those of the calling process and are trusted; chunks
// written do not overlap others. No throw: where the system gives fewer threads than asked for, fewer work.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::digest {

// out[i] = XXH3-64 of the chunk_bytes bytes at ptrs[i].
void digest_scattered(const std::uint64_t* ptrs, std::size_t n, std::size_t chunk_bytes, unsigned threads,
                      std::uint64_t* out) noexcept;

// out[i] = XXH3-64 of runs * run_bytes bytes: `runs` runs, `stride` bytes apart, the first at ptrs[i].
void digest_strided(const std::uint64_t* ptrs, std::size_t n, std::size_t runs, std::size_t run_bytes,
                    std::size_t stride, std::uint64_t* out) noexcept;

// memcpy of each chunk.
void copy_scattered(const std::uint64_t* dst, const std::uint64_t* src, std::size_t n, std::size_t chunk_bytes,
                    unsigned threads) noexcept;

// Copies each chunk and digests it, in one pass.
void copy_digest_scattered(const std::uint64_t* dst, const std::uint64_t* src, std::size_t n, std::size_t chunk_bytes,
                           unsigned threads, std::uint64_t* out) noexcept;

}  // namespace kvxfer::digest
