#include "lanes/tcp_reader.hpp"

#include <algorithm>

#include "lanes/receiver_placer.hpp"

namespace kvxfer {
namespace {

using Status = ReceiverInput::Status;

// Without a digest there is no second pass that would want the bytes in the cache: long stretches go straight to the
// page.
constexpr std::uint64_t kDirectBytes = 64u << 10;

// One recv into the page itself. `got` is 0 where the leg is dead or nothing is there yet.
Status receive_into_page(ReceiverInput& input, LegIn& leg, ChunkPlacer& placer, std::size_t& got) {
  const GateHold hold(leg);
  got = 0;
  if (!leg.live()) return Status::kOk;
  const auto rest = placer.rest();
  const Status status = input.recv_into(rest.data(), std::min(rest.size(), ReceiverInput::kBufferBytes), got);
  if (status == Status::kOk) placer.placed_in_rest(got);
  return status;
}

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
  const bool direct = !leg.verify() && placer.contiguous();
  placed = false;
  while (!placer.done()) {
    if (!leg.live()) return input.skip(left);
    if (direct && input.buffered().empty() && placer.left_in_chunk() >= kDirectBytes) {
      std::size_t got = 0;
      Status status = receive_into_page(input, leg, placer, got);
      if (status == Status::kWouldBlock) status = input.wait_readable();
      if (status != Status::kOk) return status;
      left -= got;
      continue;
    }
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
