// What the receiver's tests are written with: a pool with canaries and guard pages, a leg, and a hand-written sender.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/completion_queue.hpp"
#include "core/pool_map.hpp"
#include "digest/xxh3.hpp"
#include "lanes/receiver.hpp"
#include "lanes/record.hpp"
#include "lanes/wire.hpp"

namespace kvxfer::test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint8_t kCanary = 0xA5;
constexpr std::uint32_t kSession = 3;
constexpr std::uint32_t kGeneration = 7;
constexpr std::uint64_t kReservation = 0x1122334455667788;
constexpr std::uint32_t kLeg = 1;
constexpr std::uint64_t kMaxRecordBytes = 4096;
constexpr std::array<std::uint8_t, 16> kEpoch{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

// One region between two pages that nobody may touch, filled with canaries.
class GuardedRegion {
 public:
  explicit GuardedRegion(std::size_t bytes) : bytes_(bytes), mapped_((bytes + 4095) / 4096 * 4096 + 8192) {
    void* at = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(at != MAP_FAILED);
    base_ = static_cast<std::uint8_t*>(at);
    REQUIRE(mprotect(base_ + 4096, mapped_ - 8192, PROT_READ | PROT_WRITE) == 0);
    // The region ends at the guard, so that one byte too many faults.
    data_ = base_ + mapped_ - 4096 - bytes;
    std::memset(data_, kCanary, bytes);
  }
  ~GuardedRegion() { munmap(base_, mapped_); }
  GuardedRegion(const GuardedRegion&) = delete;
  GuardedRegion& operator=(const GuardedRegion&) = delete;
  std::uint8_t* data() const { return data_; }
  std::string bytes() const { return {reinterpret_cast<const char*>(data_), bytes_}; }

 private:
  std::size_t bytes_;
  std::size_t mapped_;
  std::uint8_t* base_ = nullptr;
  std::uint8_t* data_ = nullptr;
};

class Pool {
 public:
  // One group for each inner list, whose elements are regions: (page stride, page bytes, pages).
  struct Shape {
    std::uint64_t stride, bytes, pages;
  };
  explicit Pool(const std::vector<std::vector<Shape>>& groups) {
    for (const auto& group : groups) {
      auto& out = map.groups.emplace_back();
      for (const Shape& r : group) {
        auto& region = regions.emplace_back(
            std::make_unique<GuardedRegion>(r.pages == 0 ? 0 : (r.pages - 1) * r.stride + r.bytes));
        out.push_back({region->data(), r.stride, r.bytes, r.pages});
      }
    }
  }
  std::string page(std::size_t group, std::size_t region, std::uint64_t index) const {
    const RegionMap& r = map.groups[group][region];
    return {reinterpret_cast<const char*>(r.page(index)), r.page_bytes};
  }
  std::string everything() const {
    std::string all;
    for (const auto& region : regions) all += region->bytes();
    return all;
  }

  PoolMap map;
  std::vector<std::unique_ptr<GuardedRegion>> regions;
};

inline std::string canaries(std::size_t n) { return std::string(n, static_cast<char>(kCanary)); }

// Bytes that differ from page to page and hold no canary.
inline std::string content(std::size_t n, std::uint64_t seed) {
  std::string bytes(n, '\0');
  std::uint64_t x = seed * 0x9E3779B97F4A7C15u + 1;
  for (char& b : bytes) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    b = static_cast<char>(x % 160);
  }
  return bytes;
}

inline Slice whole_page(std::uint32_t group, std::uint32_t region, std::uint64_t bytes) {
  return {group, region, 0, group, region, 1, bytes, 0, bytes, 0, bytes};
}

inline std::string pack(const std::vector<Slice>& slices) {
  return {reinterpret_cast<const char*>(slices.data()), slices.size() * sizeof(Slice)};
}

template <typename T>
std::string raw(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

// The parts of a record in which the receiver's core believes nothing but the sizes.
inline std::string make_record(record::Kind kind = record::Kind::kCommit, std::uint32_t lane = 0,
                               std::uint64_t n_chunks = 0, std::uint64_t n_folds = 0, const std::string& aux = "") {
  record::RecordHeader h{};
  h.magic = record::kMagic;
  h.version = record::kVersion;
  h.kind = static_cast<std::uint16_t>(kind);
  h.reservation = kReservation;
  std::copy(kEpoch.begin(), kEpoch.end(), h.epoch);
  h.generation = kGeneration;
  h.leg = kLeg;
  h.lane = lane;
  h.n_lanes = 1;
  h.n_chunks = n_chunks;
  h.n_folds = n_folds;
  h.aux_bytes = aux.size();
  std::string out = raw(h);
  out.append((n_chunks + 63) / 64 * 8 + n_folds * 8, '\0');
  out += aux;
  out.append((8 - aux.size() % 8) % 8, '\0');
  out += raw(digest::xxh3_64(out.data(), out.size()));
  return out;
}

// A sender that says exactly what it is told to.
class Peer {
 public:
  Peer(Receiver& receiver, std::uint32_t lane, std::shared_ptr<const PeerMemory> source = nullptr) : lane_(lane) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    socket_ = ends[0];
    const timeval timeout{10, 0};
    setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
    receiver.add_lane(lane, source ? "local" : "tcp", ends[1], source);
  }
  ~Peer() { hang_up(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  wire::FrameHeader header(wire::FrameType type, std::uint64_t body_bytes) {
    wire::FrameHeader h{};
    h.magic = wire::kMagic;
    h.type = static_cast<std::uint16_t>(type);
    h.generation = kGeneration;
    h.lane = lane_;
    h.sequence = sequence_++;
    h.reservation = kReservation;
    h.leg = kLeg;
    h.body_bytes = body_bytes;
    return h;
  }
  wire::FrameHeader write_header(std::uint32_t group, std::uint32_t slice, std::uint64_t page_first,
                                 std::uint32_t n_pages, std::uint64_t body_bytes) {
    wire::FrameHeader h = header(wire::FrameType::kWrite, body_bytes);
    h.group = group;
    h.slice = slice;
    h.page_first = page_first;
    h.n_pages = n_pages;
    return h;
  }
  void write(std::uint32_t group, std::uint32_t slice, std::uint64_t page_first, std::uint32_t n_pages,
             const std::string& body) {
    send(raw(write_header(group, slice, page_first, n_pages, body.size())) + body);
  }
  void record(const std::string& body) { send(raw(header(wire::FrameType::kRecord, body.size())) + body); }

  // False where the receiver has hung up.
  bool send(const std::string& bytes) {
    std::size_t sent = 0;
    while (sent < bytes.size()) {
      const ssize_t n = ::send(socket_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return false;
      sent += static_cast<std::size_t>(n);
    }
    return true;
  }
  // Until the receiver has taken all bytes off the socket.
  void wait_taken() const {
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    for (int left = 1; left > 0; std::this_thread::yield()) {
      REQUIRE(ioctl(socket_, SIOCOUTQ, &left) == 0);
      REQUIRE(Clock::now() < deadline);
    }
  }
  std::optional<wire::FrameHeader> receive(int timeout_ms = 5000) const {
    pollfd fd{socket_, POLLIN, 0};
    wire::FrameHeader h;
    if (poll(&fd, 1, timeout_ms) != 1 || recv(socket_, &h, sizeof(h), MSG_WAITALL) != sizeof(h)) return std::nullopt;
    return h;
  }
  void hang_up() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }

 private:
  std::uint32_t lane_;
  int socket_ = -1;
  std::uint64_t sequence_ = 0;
};

// Collects completions until one fits.
class Events {
 public:
  explicit Events(CompletionQueue& cq) : cq_(cq) {}

  std::optional<Completion> wait(Kind kind, milliseconds timeout = milliseconds(10'000)) {
    const auto deadline = Clock::now() + timeout;
    while (true) {
      for (Completion& c : cq_.drain()) seen_.push_back(std::move(c));
      const auto at = std::find_if(seen_.begin(), seen_.end(), [&](const Completion& c) { return c.kind == kind; });
      if (at != seen_.end()) {
        Completion found = std::move(*at);
        seen_.erase(at);
        return found;
      }
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) return std::nullopt;
      pollfd fd{cq_.fileno(), POLLIN, 0};
      poll(&fd, 1, static_cast<int>(left));
    }
  }
  // The text of the next such event; a failed requirement where none comes.
  std::string text(Kind kind) {
    const auto found = wait(kind);
    REQUIRE(found.has_value());
    return found->data;
  }
  bool none(Kind kind) { return !wait(kind, milliseconds(0)).has_value(); }

 private:
  CompletionQueue& cq_;
  std::vector<Completion> seen_;
};

inline bool starts_with(const std::string& text, const std::string& start) { return text.rfind(start, 0) == 0; }

// Runs `then` in the thread that places bytes, at the moment when it first touches the memory.
class Tripwire {
 public:
  Tripwire(std::uint8_t* at, std::size_t bytes, std::function<void()> then) {
    at_ = at, bytes_ = bytes, then_ = std::move(then);
    struct sigaction action {};
    action.sa_handler = [](int) {
      mprotect(at_, bytes_, PROT_READ | PROT_WRITE);
      then_();
    };
    sigaction(SIGSEGV, &action, &before_);
    REQUIRE(mprotect(at_, bytes_, PROT_NONE) == 0);
  }
  ~Tripwire() {
    mprotect(at_, bytes_, PROT_READ | PROT_WRITE);
    sigaction(SIGSEGV, &before_, nullptr);
  }
  Tripwire(const Tripwire&) = delete;
  Tripwire& operator=(const Tripwire&) = delete;

 private:
  static inline std::uint8_t* at_ = nullptr;
  static inline std::size_t bytes_ = 0;
  static inline std::function<void()> then_;
  struct sigaction before_ {};
};

// A pool of one group with two regions of 6 pages, a leg over pool pages 4, 1 and 3, and a receiver.
struct Rig {
  static constexpr std::uint64_t kPageBytes = 512;
  explicit Rig(bool verify = true)
      : pool({{{kPageBytes + 64, kPageBytes, 6}, {kPageBytes, kPageBytes, 6}}}),
        receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes),
        events(cq) {
    open(kReservation, kLeg, {4, 1, 3}, verify);
  }
  void open(std::uint64_t reservation, std::uint32_t leg, std::vector<std::uint64_t> pages, bool verify = true) {
    std::vector<std::uint64_t> logical(pages.size());
    for (std::size_t k = 0; k < pages.size(); ++k) logical[k] = 10 + k;
    receiver.open_leg(reservation, leg, verify, pack({whole_page(0, 0, kPageBytes), whole_page(0, 1, kPageBytes)}),
                      {{0, 16, logical, std::move(pages)}});
  }
  LegIn::Report report() { return receiver.report(kReservation, kLeg); }
  // A record behind everything sent so far: when it is here, so is all else.
  void barrier(Peer& peer) {
    peer.record(make_record());
    REQUIRE(events.wait(Kind::kRecord).has_value());
  }

  CompletionQueue cq;
  Pool pool;
  Receiver receiver;
  Events events;
};

}  // namespace kvxfer::test
