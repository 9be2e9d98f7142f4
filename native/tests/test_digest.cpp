// The digest against libxxhash, on every vector path this CPU has.
#include <doctest/doctest.h>
#include <xxhash.h>

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "digest/kernels.hpp"
#include "digest/scattered.hpp"
#include "digest/xxh3.hpp"

using namespace kvxfer::digest;

namespace {

std::vector<unsigned char> random_bytes(std::size_t n, unsigned seed = 1) {
  std::minstd_rand random(seed);
  std::vector<unsigned char> bytes(n);
  for (unsigned char& b : bytes) b = static_cast<unsigned char>(random() >> 8);
  return bytes;
}

std::vector<std::size_t> interesting_lengths() {
  std::vector<std::size_t> lengths;
  for (std::size_t n = 0; n <= 1300; ++n) lengths.push_back(n);
  for (std::size_t block = 2048; block <= 16384; block += 1024) {
    for (int d : {-65, -64, -63, -1, 0, 1, 63, 64, 65}) lengths.push_back(block + d);
  }
  for (std::size_t n : {73'728UL, 65'536UL, 65'537UL, 131'071UL}) lengths.push_back(n);
  return lengths;
}

// Runs the body once per vector path and leaves the best one in use, also where the body fails.
template <typename Body>
void on_every_path(const Body& body) {
  struct Restore {
    ~Restore() { use_kernels(*available_kernels().front()); }
  } restore;
  for (const Kernels* kernels : available_kernels()) {
    use_kernels(*kernels);
    CAPTURE(std::string(isa()));
    body();
  }
}

// A destination with guard bytes on both sides, at a chosen distance from 64-byte alignment.
class GuardedBuffer {
 public:
  GuardedBuffer(std::size_t n, std::size_t offset) : bytes_(n + 4 * 64, 0xA5), n_(n) {
    const auto base = reinterpret_cast<std::uintptr_t>(bytes_.data());
    start_ = (64 - base % 64) + 64 + offset;
  }
  unsigned char* data() { return bytes_.data() + start_; }
  bool guards_intact() const {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < start_ || i >= start_ + n_) && bytes_[i] != 0xA5) return false;
    }
    return true;
  }

 private:
  std::vector<unsigned char> bytes_;
  std::size_t n_, start_;
};

}  // namespace

TEST_CASE("digest equals libxxhash at every length class") {
  const auto data = random_bytes(140'000);
  on_every_path([&] {
    for (std::size_t n : interesting_lengths()) {
      for (std::size_t offset : {0, 1, 8}) {
        REQUIRE_MESSAGE(xxh3_64(data.data() + offset, n) == XXH3_64bits(data.data() + offset, n), "n=" << n);
      }
    }
  });
}

TEST_CASE("fused copy writes exactly the source's bytes and returns their digest") {
  const auto data = random_bytes(140'000);
  on_every_path([&] {
    for (auto* fused : {copy_xxh3_64, copy_xxh3_64_unfenced}) {
      for (std::size_t n : interesting_lengths()) {
        for (std::size_t offset : {0, 1, 16, 63}) {
          GuardedBuffer dst(n, offset);
          const std::uint64_t digest = fused(dst.data(), data.data() + 3, n);
          REQUIRE_MESSAGE(digest == XXH3_64bits(data.data() + 3, n), "n=" << n << " offset=" << offset);
          REQUIRE(std::memcmp(dst.data(), data.data() + 3, n) == 0);
          REQUIRE_MESSAGE(dst.guards_intact(), "n=" << n << " offset=" << offset);
        }
      }
    }
  });
}

TEST_CASE("fused copy at every alignment of the destination and every remainder stays within both buffers") {
  on_every_path([&] {
    for (std::size_t offset = 0; offset < 64; ++offset) {
      for (std::size_t least : {256, 1'024, 9'200}) {
        for (std::size_t n = least; n < least + 64; ++n) {
          const auto data = random_bytes(n);  // no slack: the address sanitizer sees a read past the end
          GuardedBuffer dst(n, offset);
          REQUIRE(copy_xxh3_64_unfenced(dst.data(), data.data(), n) == XXH3_64bits(data.data(), n));
          REQUIRE(std::memcmp(dst.data(), data.data(), n) == 0);
          REQUIRE(dst.guards_intact());
        }
      }
    }
  });
}

// Races on purpose, as a source that prefill reuses does: what counts is that the digest is that of the bytes stored.
#if !defined(__SANITIZE_THREAD__)
TEST_CASE("a source that changes during a fused copy is never stored otherwise than it was digested") {
  for (const Kernels* kernels : available_kernels()) {
    use_kernels(*kernels);
    for (std::size_t shift : {0, 1, 17}) {
      for (std::size_t n : {257, 1000, 4096, 65536}) {
        std::vector<unsigned char> source(n), target(n + 128);
        unsigned char* dst = target.data() + (64 - reinterpret_cast<std::uintptr_t>(target.data()) % 64) % 64 + shift;
        std::atomic<bool> stop{false};
        std::thread writer([&] {
          for (unsigned char value = 0; !stop.load(std::memory_order_relaxed); ++value) {
            for (std::size_t i = 0; i < n; i += 8) *static_cast<volatile unsigned char*>(&source[i]) = value;
            for (std::size_t i = n - 8; i < n; ++i) *static_cast<volatile unsigned char*>(&source[i]) = value;
          }
        });
        std::size_t torn = 0;
        for (int round = 0; round < 200; ++round) {
          torn += copy_xxh3_64(dst, source.data(), n) != XXH3_64bits(dst, n);
          Hasher hasher;
          const std::size_t half = n / 2;
          hasher.copy_update(dst, source.data(), half);
          hasher.copy_update(dst + half, source.data() + half, n - half);
          torn += hasher.digest() != XXH3_64bits(dst, n);
        }
        stop = true;
        writer.join();
        INFO(std::string(kernels->name) << " shift " << shift << " n " << n);
        CHECK(torn == 0);
      }
    }
  }
  use_kernels(*available_kernels().front());
}
#endif

TEST_CASE("hasher gives the same digest however the input is split") {
  const auto data = random_bytes(60'000);
  std::mt19937 random(7);
  on_every_path([&] {
    for (std::size_t largest : {1UL, 3UL, 63UL, 64UL, 65UL, 240UL, 241UL, 1'000UL, 1'024UL, 20'000UL}) {
      for (std::size_t n :
           {0UL, 1UL, 64UL, 239UL, 240UL, 241UL, 255UL, 256UL, 257UL, 1'024UL, 1'025UL, 2'048UL, 10'240UL, 59'999UL}) {
        GuardedBuffer dst(n, n % 64), dst_unfenced(n, (n + 7) % 64);
        Hasher hashing, copying, copying_unfenced;
        for (std::size_t done = 0; done < n;) {
          const std::size_t piece = std::min<std::size_t>(n - done, 1 + random() % largest);
          hashing.update(data.data() + done, piece);
          copying.copy_update(dst.data() + done, data.data() + done, piece);
          copying_unfenced.copy_update_unfenced(dst_unfenced.data() + done, data.data() + done, piece);
          done += piece;
        }
        const std::uint64_t expected = XXH3_64bits(data.data(), n);
        REQUIRE_MESSAGE(hashing.digest() == expected, "n=" << n << " largest=" << largest);
        for (auto [hasher, buffer] : {std::pair{&copying, &dst}, std::pair{&copying_unfenced, &dst_unfenced}}) {
          REQUIRE_MESSAGE(hasher->digest() == expected, "n=" << n << " largest=" << largest);
          REQUIRE(std::memcmp(buffer->data(), data.data(), n) == 0);
          REQUIRE(buffer->guards_intact());
        }
      }
    }
  });
}

TEST_CASE("hasher's digest may be asked for between updates") {
  const auto data = random_bytes(3'000);
  on_every_path([&] {
    Hasher hasher;
    for (std::size_t n = 0; n < data.size(); ++n) {
      REQUIRE_MESSAGE(hasher.digest() == XXH3_64bits(data.data(), n), "n=" << n);
      hasher.update(data.data() + n, 1);
    }
  });
}

TEST_CASE("hasher is as new after reset") {
  const auto data = random_bytes(5'000);
  Hasher hasher;
  hasher.update(data.data(), data.size());
  hasher.reset();
  CHECK(hasher.digest() == XXH3_64bits(nullptr, 0));
  hasher.update(data.data(), 300);
  CHECK(hasher.digest() == XXH3_64bits(data.data(), 300));
}

TEST_CASE("scattered calls treat every chunk once, whatever the number of threads") {
  constexpr std::size_t kChunk = 1'500, kCount = 37;
  const auto source = random_bytes(kChunk * kCount);
  for (unsigned threads : {1U, 2U, 5U, 100U}) {
    std::vector<unsigned char> copied(source.size()), fused(source.size());
    std::vector<std::uint64_t> from, to_copy, to_fuse, expected;
    for (std::size_t i = 0; i < kCount; ++i) {
      const std::size_t k = (i * 11) % kCount;  // not in order of address
      from.push_back(reinterpret_cast<std::uintptr_t>(source.data() + k * kChunk));
      to_copy.push_back(reinterpret_cast<std::uintptr_t>(copied.data() + k * kChunk));
      to_fuse.push_back(reinterpret_cast<std::uintptr_t>(fused.data() + k * kChunk));
      expected.push_back(XXH3_64bits(source.data() + k * kChunk, kChunk));
    }
    std::vector<std::uint64_t> read(kCount), while_copying(kCount);
    digest_scattered(from.data(), kCount, kChunk, threads, read.data());
    copy_scattered(to_copy.data(), from.data(), kCount, kChunk, threads);
    copy_digest_scattered(to_fuse.data(), from.data(), kCount, kChunk, threads, while_copying.data());
    CHECK(read == expected);
    CHECK(while_copying == expected);
    CHECK(copied == source);
    CHECK(fused == source);
  }
}

TEST_CASE("scattered calls accept no chunks and chunks of no bytes") {
  digest_scattered(nullptr, 0, 4'096, 4, nullptr);
  copy_scattered(nullptr, nullptr, 0, 4'096, 4);
  const std::uint64_t null[1] = {0};
  std::uint64_t digest[1] = {0};
  copy_digest_scattered(null, null, 1, 0, 1, digest);
  CHECK(digest[0] == XXH3_64bits(nullptr, 0));
}

TEST_CASE("strided digest is that of the runs laid end to end") {
  const auto data = random_bytes(40'000);
  for (std::size_t run_bytes : {1UL, 7UL, 64UL, 1'000UL, 1'024UL}) {
    for (std::size_t stride : {run_bytes, run_bytes + 5, 2'048UL}) {
      constexpr std::size_t kRuns = 9;
      std::vector<unsigned char> joined;
      for (std::size_t run = 0; run < kRuns; ++run) {
        const unsigned char* start = data.data() + 2 + run * stride;
        joined.insert(joined.end(), start, start + run_bytes);
      }
      const std::uint64_t ptr = reinterpret_cast<std::uintptr_t>(data.data() + 2);
      std::uint64_t digest = 0;
      digest_strided(&ptr, 1, kRuns, run_bytes, stride, &digest);
      CHECK_MESSAGE(digest == XXH3_64bits(joined.data(), joined.size()), "run " << run_bytes << " stride " << stride);
    }
  }
}

TEST_CASE("bound digest is that of the 64 bytes in the documented order") {
  BindKey key{0x1122334455667788U, {}, 3};
  for (unsigned char i = 0; i < 16; ++i) key.epoch[i] = static_cast<std::uint8_t>(0xF0 + i);
  unsigned char bytes[64] = {};
  const std::uint64_t content = 42, logical = 1'000'000'007;
  const std::uint32_t place[4] = {3, 4, 5, 6};  // leg, group, region, slice
  std::memcpy(bytes, &content, 8);
  std::memcpy(bytes + 8, &key.reservation, 8);
  std::memcpy(bytes + 16, key.epoch, 16);
  std::memcpy(bytes + 32, place, 16);
  std::memcpy(bytes + 48, &logical, 8);
  CHECK(bind(content, key, 4, 5, 6, logical) == XXH3_64bits(bytes, 64));
}
