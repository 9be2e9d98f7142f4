// One lane's end at decode: its socket, and the thread that reads frames from it and judges them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/completion_queue.hpp"
#include "lanes/leg_in_registry.hpp"
#include "lanes/local_reader.hpp"
#include "lanes/peer_memory.hpp"
#include "lanes/receiver_fd.hpp"
#include "lanes/receiver_input.hpp"
#include "lanes/wire.hpp"

namespace kvxfer {

class ReceiverLane {
 public:
  // What all lanes of a receiver share; outlives them.
  struct Shared {
    CompletionQueue& cq;
    LegRegistry& legs;
    std::uint32_t session;
    std::uint32_t generation;
    std::uint64_t max_record_bytes;
    std::uint64_t max_chunk_bytes;  // of any region of the pool
    std::atomic<std::uint64_t> sunk_frames{0};
  };

  // `source` is given for a local lane and only there. Owns `socket` from start() on.
  // Throws std::system_error where there are no descriptors left.
  ReceiverLane(Shared& shared, std::uint32_t lane, int socket, std::shared_ptr<const PeerMemory> source);
  ~ReceiverLane();  // stop() and join()
  ReceiverLane(const ReceiverLane&) = delete;
  ReceiverLane& operator=(const ReceiverLane&) = delete;

  void start();  // throws std::system_error where no thread can be made; the socket is then still the caller's
  void stop() noexcept;
  void join() noexcept;
  std::uint32_t lane() const noexcept { return lane_; }

 private:
  using Status = ReceiverInput::Status;

  void run() noexcept;
  // All of these return kOk while the lane goes on. A framing violation sets down_cause_ and returns kFailed.
  Status read_frame();
  Status read_write(const wire::FrameHeader& header);
  Status read_local_write(const wire::FrameHeader& header, LegIn& leg, const WritePlan& plan);
  Status read_record(const wire::FrameHeader& header);
  Status judge_record(const wire::FrameHeader& header, LegIn* leg, std::optional<wire::SourceRef> source,
                      std::string record);
  Status confirm(const wire::FrameHeader& header);
  std::string framing_error(const wire::FrameHeader& header) const;
  // Whether the pages named by the leg's frames were still pinned; the first time they were not is a violation.
  bool source_intact(const wire::FrameHeader& header, LegIn& leg, const wire::SourceRef& source);

  Status refuse_frame(const wire::FrameHeader& header, const std::string& why);
  void violation(const wire::FrameHeader& header, LegIn* leg, const std::string& why);
  bool may_report_unknown() noexcept;
  void push(Kind kind, std::uint64_t reservation, std::uint32_t leg, std::string data);
  std::string down_cause(Status status) const;

  Shared& shared_;
  const std::uint32_t lane_;
  const int socket_;
  OwnedFd owned_socket_{-1};  // socket_ once the thread runs
  const OwnedFd wake_;
  std::atomic<bool> stop_{false};
  std::shared_ptr<const PeerMemory> source_;
  ReceiverInput input_;
  std::optional<LocalReader> local_;
  std::vector<std::uint64_t> source_pages_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t next_confirm_ = 0;
  bool inside_frame_ = false;
  std::string violation_;
  double unknown_reports_;  // a token bucket
  std::chrono::steady_clock::time_point unknown_refilled_;
  std::thread thread_;
};

}  // namespace kvxfer
