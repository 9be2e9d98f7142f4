// Prefill's side of one session in one generation: its lanes, the legs they carry, and which lane sends what next.
// Thread-safe. Lock order: a grant's mutex, then this session's, then the leaves (generation table, completion queue).
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/completion_queue.hpp"
#include "lanes/leg_out.hpp"
#include "lanes/sender_generations.hpp"
#include "lanes/sender_lane.hpp"

namespace kvxfer {

class SenderSession {
 public:
  using Leg = std::shared_ptr<LegOut>;

  // `queue` and `table` must outlive the session.
  SenderSession(CompletionQueue& queue, GenerationTable& table, std::uint32_t session,
                const std::array<std::uint8_t, 16>& epoch, std::uint32_t generation, std::uint32_t n_lanes);
  ~SenderSession();
  SenderSession(const SenderSession&) = delete;
  SenderSession& operator=(const SenderSession&) = delete;

  std::uint32_t generation() const noexcept { return generation_; }
  const std::array<std::uint8_t, 16>& epoch() const noexcept { return epoch_; }

  // Throws Error; the fd is then still the caller's.
  void add_lane(std::uint32_t lane, LaneKind kind, int fd);
  // Fails all legs, ends all lanes and joins their threads. Idempotent.
  void close();

  // ---- legs
  // Throws Error("busy: ...", "closed: ..."), std::invalid_argument for lanes out of range or a reservation attached
  // before. A leg with a lane that is down already fails by event.
  void attach(const Leg& leg);
  // Queues batches; ignored once the leg has ended.
  void publish(const Leg& leg, std::span<const Batch> batches);
  void commit(const Leg& leg, std::shared_ptr<const Commit> commit);
  // Lets the lanes send what is queued; small amounts go out from the caller's thread.
  void post(const Leg& leg, bool small);
  void close_admission(const Leg& leg);
  // When it returns no lane reads the leg's sources; no event follows unless its end had been asked for.
  void detach(const Leg& leg);
  // Content digests of posted chunks, 0 for others. Throws std::invalid_argument("bounds: ...").
  std::vector<std::uint64_t> digests(const Leg& leg, std::uint64_t first, std::uint64_t count);

  // ---- for lanes, with the mutex held
  std::mutex& mutex() noexcept { return mutex_; }
  SendJob next_job(const SenderLane& lane);
  // The job's frame went out whole.
  void finish(const SenderLane& lane, SendJob& job);
  // The job's frame will not go out, or not with the leg's bytes.
  void abandon(SendJob& job);
  void stop_reading(SendJob& job);
  void end(const Leg& leg, LegOut::End how, const std::string& cause);
  void lane_down(const SenderLane& lane, const std::string& cause);
  // False if the leg has no record on that lane to be confirmed.
  bool confirm(const SenderLane& lane, std::uint64_t reservation, std::uint32_t leg);

 private:
  SendJob write_job(const SenderLane& lane, const Leg& leg, std::size_t position);
  SendJob record_job(const SenderLane& lane, const Leg& leg, std::size_t position, SendJob::What what);
  void activate(const Leg& leg);
  void deactivate_if_idle(const Leg& leg);
  void drop_active(const Leg& leg);
  void wake_for(const LegOut& leg);
  void settle(const Leg& leg);
  bool records_delivered(const LegOut& leg) const;
  void report(const Leg& leg);
  void push(Kind kind, std::int32_t lane, std::string data);

  CompletionQueue& queue_;
  GenerationTable& table_;
  const std::uint32_t session_;
  const std::array<std::uint8_t, 16> epoch_;
  const std::uint32_t generation_;

  std::mutex close_mutex_;
  std::mutex mutex_;
  std::condition_variable leg_ended_;
  bool closed_ = false;
  std::vector<std::unique_ptr<SenderLane>> lanes_;  // null until connected
  std::unordered_map<std::uint64_t, Leg> legs_;     // by reservation
  std::vector<Leg> active_;                         // legs with something to send
  std::size_t turn_ = 0;                            // whose turn it is in active_
};

}  // namespace kvxfer
