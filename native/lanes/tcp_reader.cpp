#include "lanes/tcp_reader.hpp"

#include <algorithm>

#include "lanes/receiver_placer.hpp"

namespace kvxfer {
namespace {

using Status = ReceiverInput::Status;

// Everything goes through the input's buffer: a recv straight into the page, digested in the cache afterwards, was no
// faster (its cold page costs what the fused copy costs), and this way no system call is made under the gate, and small
// chunks need no call each.

// Places what is buffered, except for a cut that would leave the digest's fast path. Returns how much that was.
std::size_t place_buffered(ReceiverInput& input, LegIn& leg, ChunkPlacer& placer) {
  const GateHold hold(leg);
  std::size_t total = 0;
  while (!placer.done() && leg.live()) {
    const auto have = input.buffered();
    std::size_t n = have.size();
    if (n < placer.left_in_chunk()) n -= n % ChunkPlacer::kCutBytes;
    if (n == 0) break;
    n = placer.place(have.data(), n);
    input.consume(n);
    total += n;
  }
  return total;
}

}  // namespace

Status read_tcp_body(ReceiverInput& input, LegIn& leg, const WritePlan& plan, bool& placed) {
  ChunkPlacer placer(leg, plan);
  std::uint64_t left = plan.n_pages * plan.chunk_bytes;
  placed = false;
  while (!placer.done()) {
    if (!leg.live()) return input.skip(left);
    const std::size_t n = place_buffered(input, leg, placer);
    left -= n;
    if (n > 0 || placer.done() || !leg.live()) continue;
    const Status status = input.more();
    if (status != Status::kOk) return status;
  }
  placed = true;
  return Status::kOk;
}

}  // namespace kvxfer
