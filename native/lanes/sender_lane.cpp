#include "lanes/sender_lane.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "core/error.hpp"
#include "digest/xxh3.hpp"
#include "lanes/record_builder.hpp"
#include "lanes/sender_session.hpp"

namespace kvxfer {
namespace {

// After this much the thread looks for input, and a caller leaves the rest to the thread.
constexpr std::size_t kThreadBudget = 8 << 20;
constexpr std::size_t kCallerBudget = 256 << 10;
constexpr std::size_t kStepBytes = 512 << 10;
// A local lane's frames only name pages, so a socket of usual size would take a whole handoff: the first lane would get it
// all and the other copiers nothing. With this one a lane holds some ten frames and the rest stays for whoever is free.
constexpr int kLocalSendBuffer = 4096;

struct SourceChanged {
  std::string what;
};

template <typename T>
void append(std::vector<std::uint8_t>& out, const T* data, std::size_t n) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(data);
  out.insert(out.end(), bytes, bytes + n * sizeof(T));
}

std::string errno_text(const char* call) { return std::string(call) + ": " + std::strerror(errno); }

}  // namespace

SenderLane::SenderLane(SenderSession& session, std::uint32_t index, LaneKind kind, int fd)
    : session_(session), index_(index), kind_(kind), fd_(-1), wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_fd_ < 0) throw_errno("eventfd");
  if (kind == LaneKind::kLocal) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kLocalSendBuffer, sizeof(kLocalSendBuffer));
  fd_ = fd;
}

SenderLane::~SenderLane() {
  join();
  if (fd_ >= 0) close(fd_);
  close(wake_fd_);
}

void SenderLane::start() {
  // Signals are the engine's: none may be delivered to a thread that it does not know.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread(&SenderLane::run, this);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), ("kvx-send-" + std::to_string(index_ % 1000)).c_str());
}

void SenderLane::wake() noexcept {
  if (!waiting_) return;
  waiting_ = false;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(wake_fd_, &one, sizeof(one));
}

bool SenderLane::rouse_if_idle() noexcept {
  if (!up_ || !waiting_ || owner_ != Owner::kNobody || frame_.busy()) return false;
  wake();
  return true;
}

void SenderLane::stop() noexcept {
  stopping_ = true;
  waiting_ = true;
  wake();
}

void SenderLane::join() {
  if (thread_.joinable()) thread_.join();
}

void SenderLane::post_from_caller(std::unique_lock<std::mutex>& lock) {
  if (!up_ || stopping_ || owner_ != Owner::kNobody || !failure_.empty() || frame_.busy()) return;
  owner_ = Owner::kCaller;
  const Pumped pumped = pump(lock, kCallerBudget);
  owner_ = Owner::kNobody;
  owner_left_.notify_all();
  if (pumped != Pumped::kIdle) wake();
}

void SenderLane::run() {
  std::unique_lock lock(session_.mutex());
  while (!stopping_ && failure_.empty()) {
    Pumped pumped = Pumped::kIdle;
    if (owner_ == Owner::kNobody) {
      owner_ = Owner::kThread;
      pumped = pump(lock, kThreadBudget);
      owner_ = Owner::kNobody;
      owner_left_.notify_all();
      if (pumped == Pumped::kFailed || stopping_) break;
    }
    waiting_ = pumped != Pumped::kMore;
    lock.unlock();
    const short wanted = pumped == Pumped::kBlocked ? POLLIN | POLLOUT : POLLIN;
    pollfd fds[2] = {{fd_, wanted, 0}, {wake_fd_, POLLIN, 0}};
    poll(fds, 2, pumped == Pumped::kMore ? 0 : -1);
    if (fds[1].revents & POLLIN) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t n = read(wake_fd_, &count, sizeof(count));
    }
    if (fds[0].revents & (POLLIN | POLLHUP | POLLERR)) read_input();
    lock.lock();
    waiting_ = false;
  }
  owner_left_.wait(lock, [this] { return owner_ == Owner::kNobody; });
  owner_ = Owner::kThread;
  up_ = false;
  if (!stopping_) session_.lane_down(*this, failure_);
  session_.abandon(job_);
  shutdown(fd_, SHUT_RDWR);
  close(fd_);
  fd_ = -1;
}

// Called and returns with the lock held and the lane owned by the caller.
SenderLane::Pumped SenderLane::pump(std::unique_lock<std::mutex>& lock, std::size_t budget) {
  for (std::size_t sent = 0; !stopping_;) {
    if (!frame_.busy()) {
      job_ = session_.next_job(*this);
      if (!job_.leg) return Pumped::kIdle;
      lock.unlock();
      bool built = true;
      std::string failure;
      try {
        built = build();
      } catch (const SourceChanged& changed) {
        failure = "source_changed: " + changed.what;
      } catch (const std::exception& error) {
        failure = std::string("lane: ") + error.what();
      }
      lock.lock();
      if (!built || !failure.empty()) {
        frame_ = {};
        if (!failure.empty()) session_.end(job_.leg, LegOut::End::kFail, failure);
        session_.abandon(job_);
        continue;
      }
      // Bytes that were gathered, or only named, need no source from here on.
      if (job_.reading && (job_.batch.recheck || kind_ == LaneKind::kLocal)) session_.stop_reading(job_);
    }
    if (job_.reading && job_.leg->end != LegOut::End::kOpen) {
      frame_.zero_rest();
      session_.abandon(job_);
    }
    if (sent >= budget) return Pumped::kMore;
    lock.unlock();
    const auto how = frame_.send(fd_, std::min(kStepBytes, budget - sent));
    const int error = errno;
    lock.lock();
    sent += frame_.last_sent();
    if (how == Transmission::Sent::kFailed) {
      errno = error;
      if (failure_.empty()) failure_ = errno_text("send");
      return Pumped::kFailed;
    }
    if (how == Transmission::Sent::kAll) {
      session_.finish(*this, job_);
    } else if (frame_.last_sent() == 0) {
      return Pumped::kBlocked;
    }
  }
  return Pumped::kMore;
}

// False where the leg was cancelled meanwhile: no frame then.
bool SenderLane::build() {
  std::vector<std::uint8_t>& head = frame_.begin();
  wire::FrameHeader header{};
  header.magic = wire::kMagic;
  header.type = static_cast<std::uint16_t>(job_.what == SendJob::What::kWrite ? wire::FrameType::kWrite
                                                                              : wire::FrameType::kRecord);
  header.generation = job_.leg->spec.generation;
  header.lane = index_;
  header.sequence = sequence_;
  header.reservation = job_.leg->spec.reservation;
  header.leg = job_.leg->spec.leg;
  if (job_.what == SendJob::What::kWrite) {
    header.group = job_.leg->table.groups()[job_.batch.group].group;
    header.slice = job_.batch.slice;
    header.n_pages = job_.batch.n_pages;
    header.page_first = job_.batch.page_first;
  }
  append(head, &header, 1);
  if (kind_ == LaneKind::kLocal) append(head, &job_.pin, 1);
  if (job_.what == SendJob::What::kWrite) {
    if (!build_write(head)) return false;
    header.body_bytes = kind_ == LaneKind::kLocal ? head.size() - sizeof(header)
                                                  : job_.leg->source(job_.batch).chunk_bytes() * job_.batch.n_pages;
  } else {
    build_record(head);
    header.body_bytes = head.size() - sizeof(header);
  }
  std::memcpy(head.data(), &header, sizeof(header));
  ++sequence_;
  return true;
}

bool SenderLane::build_write(std::vector<std::uint8_t>& head) {
  const Batch& batch = job_.batch;
  const std::uint64_t* pages = job_.leg->source_pages[batch.group].data() + batch.page_first;
  const bool by_reference = kind_ == LaneKind::kLocal;
  if (batch.recheck && !take_from_checked_source(by_reference ? nullptr : &head)) return false;
  if (by_reference) {
    append(head, pages, batch.n_pages);
  } else if (!batch.recheck) {
    frame_.add_chunks(job_.leg->source(batch), pages, batch.n_pages);
  }
  return true;
}

// For parts of pages that were written before this leg was known: what is sent, or vouched for, comes from a copy that
// has the digest taken at write().
bool SenderLane::take_from_checked_source(std::vector<std::uint8_t>* out) {
  const Batch& batch = job_.batch;
  LegOut& leg = *job_.leg;
  const LegGroup& group = leg.table.groups()[batch.group];
  const SliceSource& source = leg.source(batch);
  const std::uint64_t page_bytes = source.region->page_bytes;
  if (scratch_bytes_ < page_bytes) {
    scratch_ = std::make_unique_for_overwrite<std::uint8_t[]>(page_bytes);
    scratch_bytes_ = page_bytes;
  }
  for (std::uint32_t i = 0; i < batch.n_pages; ++i) {
    if (leg.cancelled.load(std::memory_order_relaxed)) return false;
    const std::uint64_t index = std::uint64_t{batch.page_first} + i;
    const std::uint64_t page = leg.source_pages[batch.group][index];
    std::uint64_t& content = leg.content[group.ordinal(index, batch.slice)];
    if (digest::copy_xxh3_64(scratch_.get(), source.region->page(page), page_bytes) != content) {
      throw SourceChanged{"page " + std::to_string(page) + " (logical " + std::to_string(group.logical[index]) +
                          ") of group " + std::to_string(source.group) + ", region " +
                          std::to_string(source.region_index) + " is not what was written"};
    }
    digest::Hasher hasher;
    for (std::uint64_t run = 0; run < source.runs; ++run) {
      const std::uint8_t* bytes = scratch_.get() + source.offset + run * source.stride;
      hasher.update(bytes, source.run_bytes);
      if (out != nullptr) append(*out, bytes, source.run_bytes);
    }
    content = hasher.digest();
  }
  return true;
}

void SenderLane::build_record(std::vector<std::uint8_t>& head) {
  const LegOut& leg = *job_.leg;
  RecordInput input;
  input.kind = job_.what == SendJob::What::kCommit ? record::Kind::kCommit : record::Kind::kProgress;
  input.epoch = session_.epoch();
  input.position = job_.position;
  input.posted = std::move(job_.posted);
  input.n_posted = job_.n_posted;
  input.commit = job_.commit.get();
  if (job_.with_folds) {
    digest::BindKey key{.reservation = leg.spec.reservation, .epoch = {}, .leg = leg.spec.leg};
    std::memcpy(key.epoch, input.epoch.data(), input.epoch.size());
    input.folds = leg.table.folds(key, leg.content, job_.present);
  }
  append_record(leg, input, head);
}

bool SenderLane::read_input() {
  for (;;) {
    const ssize_t n = recv(fd_, input_ + input_bytes_, sizeof(input_) - input_bytes_, MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      fail(errno_text("recv"));
      return false;
    }
    if (n == 0) {
      fail("eof");
      return false;
    }
    if (kind_ == LaneKind::kTcp) {
      fail("protocol: the reader of a tcp lane sent data");
      return false;
    }
    input_bytes_ += static_cast<std::size_t>(n);
    if (input_bytes_ < sizeof(input_)) continue;
    input_bytes_ = 0;
    wire::FrameHeader header;
    std::memcpy(&header, input_, sizeof(header));
    if (!handle(header)) return false;
  }
}

bool SenderLane::handle(const wire::FrameHeader& header) {
  const bool framed = header.magic == wire::kMagic &&
                      header.type == static_cast<std::uint16_t>(wire::FrameType::kConfirm) &&
                      header.generation == session_.generation() && header.lane == index_ &&
                      header.sequence == input_sequence_ && header.body_bytes == 0;
  if (!framed) {
    fail("protocol: not a confirmation that follows the last");
    return false;
  }
  ++input_sequence_;
  const std::lock_guard lock(session_.mutex());
  if (session_.confirm(*this, header.reservation, header.leg)) return true;
  if (failure_.empty()) failure_ = "protocol: confirmation of a record that was not sent";
  return false;
}

void SenderLane::fail(const std::string& cause) {
  const std::lock_guard lock(session_.mutex());
  if (failure_.empty()) failure_ = cause;
}

}  // namespace kvxfer
