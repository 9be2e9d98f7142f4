#include "lanes/receiver.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/error.hpp"

namespace kvxfer {
namespace {

std::uint64_t largest_page(const PoolMap& pool) {
  std::uint64_t bytes = 0;
  for (const auto& group : pool.groups) {
    for (const RegionMap& region : group) bytes = std::max(bytes, region.page_bytes);
  }
  return bytes;
}

std::string name(std::uint64_t reservation, std::uint32_t leg) {
  return "leg " + std::to_string(leg) + " of reservation " + std::to_string(reservation);
}

}  // namespace

Receiver::Receiver(CompletionQueue& cq, PoolMap pool, std::uint32_t session, const std::array<std::uint8_t, 16>& epoch,
                   std::uint32_t generation, std::uint64_t max_record_bytes)
    : pool_(std::move(pool)),
      epoch_(epoch),
      shared_{cq, legs_, session, generation, max_record_bytes, largest_page(pool_)} {}

Receiver::~Receiver() { fence(); }

void Receiver::add_lane(std::uint32_t lane, std::string_view kind, int socket,
                        std::shared_ptr<const PeerMemory> source) {
  const bool local = kind == "local";
  if (!local && kind != "tcp") throw std::invalid_argument("a lane is \"tcp\" or \"local\"");
  if (local && !source) throw std::invalid_argument("a local lane needs its source");
  if (!local) source.reset();
  const std::lock_guard lock(lanes_mutex_);
  if (fenced_) throw Error("add_lane: generation " + std::to_string(shared_.generation) + " is fenced");
  const bool known =
      std::any_of(lanes_.begin(), lanes_.end(), [lane](const auto& other) { return other->lane() == lane; });
  if (known) throw Error("add_lane: lane " + std::to_string(lane) + " is already connected");
  lanes_.reserve(lanes_.size() + 1);
  auto end = std::make_unique<ReceiverLane>(shared_, lane, socket, std::move(source));
  end->start();
  lanes_.push_back(std::move(end));
}

void Receiver::open_leg(std::uint64_t reservation, std::uint32_t leg, bool verify, std::string_view slices,
                        std::vector<LegPages> groups) {
  auto in = std::make_shared<LegIn>(pool_, reservation, epoch_, leg, verify, slices, std::move(groups));
  if (!legs_.insert(reservation, leg, std::move(in))) {
    throw std::invalid_argument("duplicate: " + name(reservation, leg) + " is already open");
  }
}

void Receiver::revoke(std::uint64_t reservation, std::uint32_t leg) {
  if (const auto in = legs_.find(reservation, leg)) in->revoke();
}

LegIn::Report Receiver::report(std::uint64_t reservation, std::uint32_t leg) {
  const auto in = require(reservation, leg);
  {
    const std::lock_guard lock(lanes_mutex_);
    for (const auto& lane : lanes_) in->share(lane->lane());
  }
  return in->report();
}

std::vector<std::uint64_t> Receiver::digests(std::uint64_t reservation, std::uint32_t leg) const {
  return require(reservation, leg)->digests();
}

void Receiver::forget(std::uint64_t reservation, std::uint32_t leg) {
  // In this order, so that a revoke() at the same time finds the leg, or one that is revoked.
  revoke(reservation, leg);
  legs_.remove(reservation, leg);
}

std::uint64_t Receiver::sunk_frames() const noexcept { return shared_.sunk_frames.load(std::memory_order_relaxed); }

void Receiver::fence() {
  const std::lock_guard lock(lanes_mutex_);
  fenced_ = true;
  for (const auto& lane : lanes_) lane->stop();
  for (const auto& lane : lanes_) lane->join();
}

std::shared_ptr<LegIn> Receiver::require(std::uint64_t reservation, std::uint32_t leg) const {
  auto in = legs_.find(reservation, leg);
  if (!in) throw Error(name(reservation, leg) + " is not open");
  return in;
}

}  // namespace kvxfer
