// Decode's ends of the lanes of one session and generation. Every method may be called from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/completion_queue.hpp"
#include "core/pool_map.hpp"
#include "lanes/leg_in.hpp"
#include "lanes/leg_in_registry.hpp"
#include "lanes/peer_memory.hpp"
#include "lanes/receiver_lane.hpp"

namespace kvxfer {

class Receiver {
 public:
  // `cq`, and the pool's memory, must outlive the receiver.
  Receiver(CompletionQueue& cq, PoolMap pool, std::uint32_t session, const std::array<std::uint8_t, 16>& epoch,
           std::uint32_t generation, std::uint64_t max_record_bytes);
  ~Receiver();  // fence()
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // Takes over a connected, authenticated stream socket of kind "tcp" or "local"; LANE_UP follows. Throws Error for a
  // lane that is already there and after fence(), std::invalid_argument for another kind or a local lane without a
  // source; the socket is then still the caller's.
  void add_lane(std::uint32_t lane, std::string_view kind, int socket, std::shared_ptr<const PeerMemory> source);

  // Throws std::invalid_argument("bounds: ...") for slices or pages outside the pool, "duplicate: ..." for a leg that
  // is already open.
  void open_leg(std::uint64_t reservation, std::uint32_t leg, bool verify, std::string_view slices,
                std::vector<LegPages> groups);
  // When it returns no further byte lands for the leg. Waits for one recv or one copy of at most 256 KiB a lane.
  void revoke(std::uint64_t reservation, std::uint32_t leg);
  // Has an entry for each lane, also where nothing came. Throws Error for an unknown leg.
  LegIn::Report report(std::uint64_t reservation, std::uint32_t leg);
  std::vector<std::uint64_t> digests(std::uint64_t reservation, std::uint32_t leg) const;
  void forget(std::uint64_t reservation, std::uint32_t leg);  // revokes first
  // Frames for unknown or revoked legs, and refused ones, whose bytes went nowhere.
  std::uint64_t sunk_frames() const noexcept;
  // Ends all lanes and joins their threads. No lane can be added afterwards; reports stay.
  void fence();

 private:
  std::shared_ptr<LegIn> require(std::uint64_t reservation, std::uint32_t leg) const;

  const PoolMap pool_;
  const std::array<std::uint8_t, 16> epoch_;
  LegRegistry legs_;
  ReceiverLane::Shared shared_;
  std::mutex lanes_mutex_;  // never taken by a lane's thread, so that fence() may join under it
  std::vector<std::unique_ptr<ReceiverLane>> lanes_;
  bool fenced_ = false;
};

}  // namespace kvxfer
