// Prefill's ends of the lanes of all its sessions. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/completion_queue.hpp"
#include "core/pool_map.hpp"
#include "lanes/sender_generations.hpp"
#include "lanes/sender_session.hpp"
#include "lanes/source_grant.hpp"

namespace kvxfer {

class Sender {
 public:
  // `queue` must outlive the sender, as must the pool's memory.
  Sender(CompletionQueue& queue, PoolMap pool, std::uint64_t frame_bytes = wire::kFrameBytes);
  ~Sender();
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  int generation_table_fd() const noexcept { return table_.fd(); }
  const PoolMap& pool() const noexcept { return pool_; }
  std::uint64_t frame_bytes() const noexcept { return frame_bytes_; }

  // Lanes of older generations are closed first. Throws Error for a generation that is not above the session's last.
  void open_session(std::uint32_t session, const std::array<std::uint8_t, 16>& epoch, std::uint32_t generation,
                    std::uint32_t n_lanes);
  // Throws Error: wrong generation, unknown session, lane connected before. The fd is then still the caller's.
  void add_lane(std::uint32_t session, std::uint32_t generation, std::uint32_t lane, LaneKind kind, int fd);
  // Destroys this end of all lanes up to `generation` and joins their threads; their legs fail. Unknown sessions are
  // fine.
  void close_session(std::uint32_t session, std::uint32_t generation);
  // The grant must not outlive the sender.
  std::unique_ptr<SourceGrant> grant(std::uint64_t id, bool digests = true);
  void close();

  // Throws Error where the session is not open in this generation.
  std::shared_ptr<SenderSession> session(std::uint32_t session, std::uint32_t generation);

 private:
  CompletionQueue& queue_;
  const PoolMap pool_;
  const std::uint64_t frame_bytes_;
  GenerationTable table_;
  std::mutex mutex_;
  bool closed_ = false;
  std::unordered_map<std::uint32_t, std::shared_ptr<SenderSession>> sessions_;
};

}  // namespace kvxfer
