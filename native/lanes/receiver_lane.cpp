#include "lanes/receiver_lane.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "lanes/record_reader.hpp"
#include "lanes/tcp_reader.hpp"

namespace kvxfer {
namespace {

constexpr int kConfirmTimeoutMs = 2000;
// Frames for legs that nobody knows are only the peer's word: their events are rationed, their number is not.
constexpr double kUnknownBurst = 64;
constexpr double kUnknownPerSecond = 16;

int make_wake() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw_errno("eventfd");
  return fd;
}

// Signals are the application's; they must reach its own threads. Those that a thread raises by itself stay with it.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

ReceiverLane::ReceiverLane(Shared& shared, std::uint32_t lane, int socket, std::shared_ptr<const PeerMemory> source)
    : shared_(shared),
      lane_(lane),
      socket_(socket),
      wake_(make_wake()),
      source_(std::move(source)),
      input_(socket_, wake_.get(), stop_),
      unknown_reports_(kUnknownBurst),
      unknown_refilled_(std::chrono::steady_clock::now()) {
  if (source_) local_.emplace(*source_, stop_);
}

ReceiverLane::~ReceiverLane() {
  stop();
  join();
}

void ReceiverLane::start() {
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
  owned_socket_.reset(socket_);
  pthread_setname_np(thread_.native_handle(), ("kvx-rx-" + std::to_string(lane_ % 10000)).c_str());
}

void ReceiverLane::stop() noexcept {
  stop_.store(true, std::memory_order_release);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  if (owned_socket_.get() >= 0) shutdown(socket_, SHUT_RDWR);
}

void ReceiverLane::join() noexcept {
  if (thread_.joinable()) thread_.join();
}

void ReceiverLane::run() noexcept {
  std::string cause;
  try {
    push(Kind::kLaneUp, 0, 0, {});
    Status status = Status::kOk;
    while (status == Status::kOk) {
      inside_frame_ = false;
      status = read_frame();
    }
    if (status == Status::kStopped) return;
    cause = down_cause(status);
  } catch (const std::exception& error) {
    cause = std::string("error: ") + error.what();
  }
  shutdown(socket_, SHUT_RDWR);
  try {
    push(Kind::kLaneDown, 0, 0, std::move(cause));
  } catch (const std::exception&) {
    // No memory for the event: the peer's missing heartbeats, or the next fence, will tell.
  }
}

std::string ReceiverLane::down_cause(Status status) const {
  if (!violation_.empty()) return "violation: " + violation_;
  if (status == Status::kEof) return inside_frame_ ? "eof: inside a frame" : "eof";
  return "error: " + input_.error();
}

ReceiverLane::Status ReceiverLane::read_frame() {
  wire::FrameHeader header;
  if (input_.stopped()) return Status::kStopped;
  while (input_.buffered().empty()) {
    const Status status = input_.more();
    if (status != Status::kOk) return status;
  }
  inside_frame_ = true;
  const Status status = input_.read(&header, sizeof(header));
  if (status != Status::kOk) return status;
  const std::string error = framing_error(header);
  if (!error.empty()) return refuse_frame(header, error);
  ++next_sequence_;
  return header.type == static_cast<std::uint16_t>(wire::FrameType::kWrite) ? read_write(header) : read_record(header);
}

std::string ReceiverLane::framing_error(const wire::FrameHeader& header) const {
  if (header.magic != wire::kMagic) return "frame: magic is not KVXF";
  if (header.generation != shared_.generation) return "frame: of generation " + std::to_string(header.generation);
  if (header.lane != lane_) return "frame: of lane " + std::to_string(header.lane);
  if (header.sequence != next_sequence_) {
    return "frame: number " + std::to_string(header.sequence) + " instead of " + std::to_string(next_sequence_);
  }
  if (header.flags != 0) return "frame: unknown flags";
  std::uint64_t least = 1;
  std::uint64_t most = 0;
  switch (static_cast<wire::FrameType>(header.type)) {
    case wire::FrameType::kWrite:
      if (header.n_pages == 0 || header.n_pages > wire::kMaxPagesPerFrame) {
        return "frame: of " + std::to_string(header.n_pages) + " pages";
      }
      most = std::max(wire::kFrameBytes, shared_.max_chunk_bytes);
      if (local_) least = most = sizeof(wire::SourceRef) + header.n_pages * sizeof(std::uint64_t);
      break;
    case wire::FrameType::kRecord:
      least = kMinRecordBytes + (local_ ? sizeof(wire::SourceRef) : 0);
      most = shared_.max_record_bytes + (local_ ? sizeof(wire::SourceRef) : 0);
      break;
    default:
      return "frame: of type " + std::to_string(header.type);
  }
  if (header.body_bytes < least || header.body_bytes > most) {
    return "frame: body of " + std::to_string(header.body_bytes) + " bytes, allowed are " + std::to_string(least) +
           " to " + std::to_string(most);
  }
  return {};
}

ReceiverLane::Status ReceiverLane::read_write(const wire::FrameHeader& header) {
  const std::shared_ptr<LegIn> leg = shared_.legs.find(header.reservation, header.leg);
  const auto sink = [&] {
    shared_.sunk_frames.fetch_add(1, std::memory_order_relaxed);
    return input_.skip(header.body_bytes);
  };
  if (!leg || !leg->live()) return sink();
  WritePlan plan;
  std::string why;
  LegIn::LaneShare& share = leg->share(lane_);
  if (!leg->plan(header, plan, why)) {
    violation(header, leg.get(), "bounds: " + why);
    return sink();
  }
  if (!local_ && header.body_bytes / plan.chunk_bytes != header.n_pages) why = "do not hold";
  if (!local_ && header.body_bytes % plan.chunk_bytes != 0) why = "do not hold";
  if (!why.empty()) {
    violation(header, leg.get(),
              "length: " + std::to_string(header.body_bytes) + " bytes for " + std::to_string(header.n_pages) +
                  " chunks of " + std::to_string(plan.chunk_bytes));
    return sink();
  }
  if (share.committed) {
    violation(header, leg.get(), "closed: a write behind the lane's commit record");
    return sink();
  }
  if (!leg->claim(plan)) {
    violation(header, leg.get(),
              "duplicate: a chunk of page indices " + std::to_string(header.page_first) + " to " +
                  std::to_string(header.page_first + header.n_pages - 1) + " of group " + std::to_string(header.group) +
                  ", slice " + std::to_string(header.slice) + " came before");
    return sink();
  }
  if (local_) return read_local_write(header, *leg, plan);
  bool placed = false;
  const Status status = read_tcp_body(input_, *leg, plan, placed);
  if (placed) leg->land(plan, share);
  return status;
}

ReceiverLane::Status ReceiverLane::read_local_write(const wire::FrameHeader& header, LegIn& leg,
                                                    const WritePlan& plan) {
  wire::SourceRef source{};
  source_pages_.resize(header.n_pages);
  Status status = input_.read(&source, sizeof(source));
  if (status == Status::kOk) status = input_.read(source_pages_.data(), header.n_pages * sizeof(std::uint64_t));
  if (status != Status::kOk) return status;
  if (!source_intact(header, leg, source)) return Status::kOk;
  std::string why;
  switch (local_->copy(leg, plan, source_pages_, why)) {
    case LocalReader::Outcome::kCopied:
      if (source_intact(header, leg, source)) leg.land(plan, leg.share(lane_));
      break;
    case LocalReader::Outcome::kDead:
      break;
    case LocalReader::Outcome::kRefused:
      violation(header, &leg, "bounds: " + why);
      break;
    case LocalReader::Outcome::kSource:
      if (leg.first_source_failure()) violation(header, &leg, "source: " + why);
      break;
  }
  return Status::kOk;
}

bool ReceiverLane::source_intact(const wire::FrameHeader& header, LegIn& leg, const wire::SourceRef& source) {
  std::string why;
  if (source_->source_intact(source.slot, source.expected, why)) return true;
  if (leg.first_source_failure()) violation(header, &leg, "source: " + why);
  return false;
}

ReceiverLane::Status ReceiverLane::read_record(const wire::FrameHeader& header) {
  const std::shared_ptr<LegIn> leg = shared_.legs.find(header.reservation, header.leg);
  std::optional<wire::SourceRef> source;
  Status status = Status::kOk;
  if (local_) status = input_.read(&source.emplace(), sizeof(wire::SourceRef));
  if (status != Status::kOk) return status;
  const std::uint64_t bytes = header.body_bytes - (local_ ? sizeof(wire::SourceRef) : 0);
  std::string record;
  if (leg && leg->live()) {
    record.resize(bytes);
    status = input_.read(record.data(), bytes);
  } else {
    status = input_.skip(bytes);
  }
  if (status != Status::kOk) return status;
  return judge_record(header, leg.get(), source, std::move(record));
}

ReceiverLane::Status ReceiverLane::judge_record(const wire::FrameHeader& header, LegIn* leg,
                                                std::optional<wire::SourceRef> source, std::string record) {
  if (leg == nullptr || !leg->live() || record.empty()) {
    shared_.sunk_frames.fetch_add(1, std::memory_order_relaxed);
    violation(header, leg, leg == nullptr ? "record: of an unknown leg" : "record: of a revoked leg");
    return local_ ? confirm(header) : Status::kOk;
  }
  record::Kind kind{};
  std::string why;
  if (!read_record_framing(record, kind, why)) {
    violation(header, leg, "record: " + why);
    return Status::kOk;
  }
  // Digests are taken as bytes land, so a progress record has nothing to start.
  if (kind == record::Kind::kProgress) return Status::kOk;
  LegIn::LaneShare& share = leg->share(lane_);
  if (share.committed) {
    violation(header, leg, "record: a second commit record on the lane");
    return Status::kOk;
  }
  if (source && !source_intact(header, *leg, *source)) return Status::kOk;
  share.committed = true;
  push(Kind::kRecord, header.reservation, header.leg, std::move(record));
  return local_ ? confirm(header) : Status::kOk;
}

// Everything before it on this lane has been handled, so no source of this lane's share is read any more.
ReceiverLane::Status ReceiverLane::confirm(const wire::FrameHeader& header) {
  wire::FrameHeader answer{};
  answer.magic = wire::kMagic;
  answer.type = static_cast<std::uint16_t>(wire::FrameType::kConfirm);
  answer.generation = shared_.generation;
  answer.lane = lane_;
  answer.sequence = next_confirm_++;
  answer.reservation = header.reservation;
  answer.leg = header.leg;
  return input_.send(&answer, sizeof(answer), kConfirmTimeoutMs);
}

ReceiverLane::Status ReceiverLane::refuse_frame(const wire::FrameHeader& header, const std::string& why) {
  // The header is not to be trusted, so the event names no leg; the lane is the one that errs.
  const std::string event = why + " (it names reservation " + std::to_string(header.reservation) + ")";
  violation_ = why;
  push(Kind::kViolation, 0, 0, event);
  return Status::kFailed;
}

void ReceiverLane::violation(const wire::FrameHeader& header, LegIn* leg, const std::string& why) {
  if (leg != nullptr ? leg->add_violation() : may_report_unknown()) {
    push(Kind::kViolation, header.reservation, header.leg, why);
  }
}

bool ReceiverLane::may_report_unknown() noexcept {
  const auto now = std::chrono::steady_clock::now();
  const double passed = std::chrono::duration<double>(now - unknown_refilled_).count();
  unknown_refilled_ = now;
  unknown_reports_ = std::min(kUnknownBurst, unknown_reports_ + passed * kUnknownPerSecond);
  if (unknown_reports_ < 1) return false;
  unknown_reports_ -= 1;
  return true;
}

void ReceiverLane::push(Kind kind, std::uint64_t reservation, std::uint32_t leg, std::string data) {
  Completion completion;
  completion.kind = kind;
  completion.session = shared_.session;
  completion.generation = shared_.generation;
  completion.lane = static_cast<std::int32_t>(lane_);
  completion.reservation = reservation;
  completion.leg = leg;
  completion.data = std::move(data);
  shared_.cq.push(std::move(completion));
}

}  // namespace kvxfer
