#include "lanes/sender.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"

namespace kvxfer {

Sender::Sender(CompletionQueue& queue, PoolMap pool, std::uint64_t frame_bytes)
    : queue_(queue),
      pool_(std::move(pool)),
      frame_bytes_(std::clamp<std::uint64_t>(frame_bytes, 1, wire::kFrameBytes)) {}

Sender::~Sender() { close(); }

void Sender::open_session(std::uint32_t session, const std::array<std::uint8_t, 16>& epoch, std::uint32_t generation,
                          std::uint32_t n_lanes) {
  auto opened = std::make_shared<SenderSession>(queue_, table_, session, epoch, generation, n_lanes);
  std::shared_ptr<SenderSession> older;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error("closed: the sender was closed");
    std::shared_ptr<SenderSession>& current = sessions_[session];
    if (current && current->generation() >= generation) {
      throw Error("session " + std::to_string(session) + " is in generation " + std::to_string(current->generation()) +
                  ": generation " + std::to_string(generation) + " cannot be opened");
    }
    older = std::exchange(current, std::move(opened));
  }
  if (older) older->close();
}

void Sender::add_lane(std::uint32_t session_id, std::uint32_t generation, std::uint32_t lane, LaneKind kind, int fd) {
  session(session_id, generation)->add_lane(lane, kind, fd);
}

void Sender::close_session(std::uint32_t session_id, std::uint32_t generation) {
  std::shared_ptr<SenderSession> closing;
  {
    const std::lock_guard lock(mutex_);
    const auto at = sessions_.find(session_id);
    if (at == sessions_.end() || at->second->generation() > generation) return;
    closing = at->second;
  }
  closing->close();
  // Only now: a second caller must wait for the threads too.
  const std::lock_guard lock(mutex_);
  const auto at = sessions_.find(session_id);
  if (at != sessions_.end() && at->second == closing) sessions_.erase(at);
}

std::unique_ptr<SourceGrant> Sender::grant(std::uint64_t id, bool digests) {
  return std::make_unique<SourceGrant>(*this, id, digests);
}

void Sender::close() {
  std::vector<std::shared_ptr<SenderSession>> closing;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (const auto& [id, session] : sessions_) closing.push_back(session);
  }
  for (const auto& session : closing) session->close();
  const std::lock_guard lock(mutex_);
  sessions_.clear();
}

std::shared_ptr<SenderSession> Sender::session(std::uint32_t session_id, std::uint32_t generation) {
  const std::lock_guard lock(mutex_);
  const auto at = sessions_.find(session_id);
  if (at == sessions_.end()) throw Error("session " + std::to_string(session_id) + " is not open");
  if (at->second->generation() != generation) {
    throw Error("session " + std::to_string(session_id) + " is in generation " +
                std::to_string(at->second->generation()) + ", not " + std::to_string(generation));
  }
  return at->second;
}

}  // namespace kvxfer
