// The loop that all vector kernels share. Included inside a namespace that defines
//   KVX_TARGET         the function attribute that enables the instruction set
//   Sums               the sums of one run of stripes: add(stripe, secret); store(dst) and stream(dst) write the stripe
//                      added last
//   Acc                the eight accumulators: load(mem), store(mem), add(sums), scramble()
//   stream_copy(dst, src)  one stripe past the caches, dst aligned
//   kPrefetchBytes     how far ahead of the stripe in hand the source is fetched
// Within a block, sums are built from zero and added once: consecutive blocks then overlap in the pipeline although the
// scramble between them is serial.

enum class Mode { kRead, kCopy, kStream, kStreamShifted };

template <Mode mode>
KVX_TARGET inline __attribute__((always_inline)) void take_stripe(Sums& sums, unsigned char* dst,
                                                                  const unsigned char* src, unsigned at, unsigned index,
                                                                  std::size_t shift) noexcept {
  sums.add(src + kStripe * at, kSecret + 8 * index);
  if constexpr (mode == Mode::kCopy) sums.store(dst + kStripe * at);
  if constexpr (mode == Mode::kStream) sums.stream(dst + kStripe * at);
  if constexpr (mode == Mode::kStreamShifted) stream_copy(dst + kStripe * at + shift, src + kStripe * at + shift);
}

template <Mode mode>
KVX_TARGET void run(std::uint64_t* memory, unsigned char* dst, const unsigned char* src, std::size_t stripes,
                    unsigned first, std::size_t shift) noexcept {
  Acc acc(memory);
  while (stripes > 0) {
    Sums sums;
    if (first == 0 && stripes >= kStripesPerBlock) {
      // The hardware's prefetcher stops at each 4 KiB of memory; past the end nothing is worth the bandwidth.
      const bool far = stripes * kStripe >= kPrefetchBytes + kStripe * kStripesPerBlock;
      const unsigned char* ahead = far ? src + kPrefetchBytes : src;
#pragma GCC unroll 16
      for (unsigned i = 0; i < kStripesPerBlock; ++i) {
        __builtin_prefetch(ahead + kStripe * i);
        take_stripe<mode>(sums, dst, src, i, i, shift);
      }
      acc.add(sums);
      acc.scramble();
      src += kStripe * kStripesPerBlock;
      if constexpr (mode != Mode::kRead) dst += kStripe * kStripesPerBlock;
      stripes -= kStripesPerBlock;
      continue;
    }
    const unsigned room = kStripesPerBlock - first;
    const unsigned taken = stripes < room ? static_cast<unsigned>(stripes) : room;
    for (unsigned i = 0; i < taken; ++i) {
      take_stripe<mode>(sums, dst, src, i, first + i, shift);
    }
    acc.add(sums);
    first += taken;
    if (first == kStripesPerBlock) {
      acc.scramble();
      first = 0;
    }
    src += kStripe * taken;
    if constexpr (mode != Mode::kRead) dst += kStripe * taken;
    stripes -= taken;
  }
  acc.store(memory);
}

KVX_TARGET void read(std::uint64_t* acc, const unsigned char* src, std::size_t stripes, unsigned first) noexcept {
  run<Mode::kRead>(acc, nullptr, src, stripes, first, 0);
}

KVX_TARGET void copy(std::uint64_t* acc, unsigned char* dst, const unsigned char* src, std::size_t stripes,
                     unsigned first) noexcept {
  run<Mode::kCopy>(acc, dst, src, stripes, first, 0);
}

KVX_TARGET void stream(std::uint64_t* acc, unsigned char* dst, const unsigned char* src, std::size_t stripes,
                       unsigned first, std::size_t shift) noexcept {
  if (shift == 0) {
    run<Mode::kStream>(acc, dst, src, stripes, first, 0);
  } else {
    run<Mode::kStreamShifted>(acc, dst, src, stripes, first, shift);
  }
}
