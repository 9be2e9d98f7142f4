// Prefill's end of one lane: a connected socket, the thread that serves it, and the frame on its way out. Whoever
// *owns* the sending side, the thread or a caller that found the lane idle, builds and sends frames; the thread alone
// reads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lanes/leg_out.hpp"
#include "lanes/record.hpp"
#include "lanes/sender_transmission.hpp"
#include "lanes/wire.hpp"

namespace kvxfer {

class SenderSession;

enum class LaneKind : std::uint8_t { kTcp, kLocal };

// What a lane took from a leg: a batch of chunks, or a record. Holds all that building the frame needs.
struct SendJob {
  enum class What : std::uint8_t { kWrite, kProgress, kCommit };

  std::shared_ptr<LegOut> leg;  // empty: no job, or its leg was cancelled and only zeros follow
  What what = What::kWrite;
  std::size_t position = 0;  // of the lane in the leg's lane set
  Batch batch;
  bool reading = false;  // counted in leg->reading
  wire::SourceRef pin{};
  std::vector<std::uint64_t> posted;  // records: this lane's bitmap
  std::uint64_t n_posted = 0;
  bool with_folds = false;
  std::vector<std::uint64_t> present;  // with_folds: posted on any lane
  std::shared_ptr<const Commit> commit;
};

class SenderLane {
 public:
  // Owns the fd from here on. start() runs the thread.
  SenderLane(SenderSession& session, std::uint32_t index, LaneKind kind, int fd);
  ~SenderLane();
  SenderLane(const SenderLane&) = delete;
  SenderLane& operator=(const SenderLane&) = delete;

  std::uint32_t index() const noexcept { return index_; }
  LaneKind kind() const noexcept { return kind_; }

  // ---- with the session's mutex held
  void start();
  bool up() const noexcept { return up_; }
  // Rouses the thread if it sleeps.
  void wake() noexcept;
  // The same, if it sleeps because it has nothing to send. False otherwise.
  bool rouse_if_idle() noexcept;
  // Asks the thread to end; what it sends is abandoned.
  void stop() noexcept;
  // Sends what the lane can without blocking, in the caller's thread, if nobody else is sending. `lock` is released
  // meanwhile; what is left over is the thread's.
  void post_from_caller(std::unique_lock<std::mutex>& lock);

  // ---- without it
  void join();
  // The fd is the caller's again: start() failed.
  void disown() noexcept { fd_ = -1; }

 private:
  enum class Owner : std::uint8_t { kNobody, kThread, kCaller };
  enum class Pumped : std::uint8_t { kIdle, kBlocked, kMore, kFailed };

  void run();
  Pumped pump(std::unique_lock<std::mutex>& lock, std::size_t budget);
  bool build();
  bool build_write(std::vector<std::uint8_t>& head);
  void build_record(std::vector<std::uint8_t>& head);
  bool take_from_checked_source(std::vector<std::uint8_t>* out);
  bool read_input();
  bool handle(const wire::FrameHeader& header);
  void fail(const std::string& cause);

  SenderSession& session_;
  const std::uint32_t index_;
  const LaneKind kind_;
  int fd_;
  int wake_fd_;
  std::thread thread_;

  // ---- session's mutex
  bool up_ = true;
  bool stopping_ = false;
  bool waiting_ = false;  // the thread sleeps, or is about to
  Owner owner_ = Owner::kNobody;
  std::condition_variable owner_left_;
  std::string failure_;
  SendJob job_;  // its contents are the owner's

  // ---- the owner's
  Transmission frame_;
  std::uint64_t sequence_ = 0;
  std::unique_ptr<std::uint8_t[]> scratch_;  // a page
  std::size_t scratch_bytes_ = 0;

  // ---- the thread's
  std::uint8_t input_[sizeof(wire::FrameHeader)];
  std::size_t input_bytes_ = 0;
  std::uint64_t input_sequence_ = 0;
};

}  // namespace kvxfer
