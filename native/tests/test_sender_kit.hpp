// What the sender's tests are written with: a source pool, lanes over socket pairs, and a reader that parses what comes.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/completion_queue.hpp"
#include "core/error.hpp"
#include "core/pool_map.hpp"
#include "digest/xxh3.hpp"
#include "lanes/record.hpp"
#include "lanes/sender.hpp"
#include "lanes/source_grant.hpp"
#include "lanes/wire.hpp"

namespace kvxfer::sender_test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint32_t kSession = 3;
constexpr std::uint32_t kGeneration = 7;
constexpr std::array<std::uint8_t, 16> kEpoch{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr milliseconds kPatience{5000};

// Anonymous memory that a test can take away: whoever still reads it faults.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_((bytes + 4095) / 4096 * 4096) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(at != MAP_FAILED);
    data_ = static_cast<std::uint8_t*>(at);
    std::uint64_t x = 88172645463325252u;
    for (std::size_t i = 0; i < bytes; ++i) {
      x ^= x << 13, x ^= x >> 7, x ^= x << 17;
      data_[i] = static_cast<std::uint8_t>(x | 1);  // never 0: zeros on the wire are the sender's
    }
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::uint8_t* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  void forbid() const { REQUIRE(mprotect(data_, bytes_, PROT_NONE) == 0); }

 private:
  std::size_t bytes_;
  std::uint8_t* data_ = nullptr;
};

// Prefill's pool: groups of regions of equal pages, back to back.
struct Source {
  struct Shape {
    std::uint32_t regions;
    std::uint64_t page_bytes, pages;
  };
  explicit Source(const std::vector<Shape>& groups) {
    for (const Shape& shape : groups) {
      auto& group = map.groups.emplace_back();
      for (std::uint32_t r = 0; r < shape.regions; ++r) {
        auto& memory = memories.emplace_back(std::make_unique<Memory>(shape.page_bytes * shape.pages));
        group.push_back({memory->data(), shape.page_bytes, shape.page_bytes, shape.pages});
      }
    }
  }
  std::string page(std::uint32_t group, std::uint32_t region, std::uint64_t index) const {
    const RegionMap& r = map.groups[group][region];
    return {reinterpret_cast<const char*>(r.page(index)), r.page_bytes};
  }
  PoolMap map;
  std::vector<std::unique_ptr<Memory>> memories;
};

inline Slice whole_page(std::uint32_t group, std::uint32_t region, std::uint64_t bytes) {
  return {group, region, 0, group, region, 1, bytes, 0, bytes, 0, bytes};
}

// One half of each of `rows` rows of a page: what one of two tensor-parallel readers takes.
inline Slice half_rows(std::uint32_t region, std::uint32_t rows, std::uint64_t half_bytes, std::uint32_t which) {
  return {0, region, which, 0, region, rows, half_bytes, which * half_bytes, 2 * half_bytes, 0, half_bytes};
}

inline std::string cut(const std::string& page, const Slice& slice) {
  std::string out;
  for (std::uint32_t run = 0; run < slice.runs; ++run) {
    out += page.substr(slice.src_offset + run * slice.src_stride, slice.run_bytes);
  }
  return out;
}

inline std::vector<std::uint64_t> range(std::uint64_t first, std::uint64_t count) {
  std::vector<std::uint64_t> out;
  for (std::uint64_t i = 0; i < count; ++i) out.push_back(first + i);
  return out;
}

struct Frame {
  wire::FrameHeader header{};
  std::string body;
};

struct ParsedRecord {
  record::RecordHeader header{};
  std::vector<record::RecordGroup> groups;
  std::set<std::uint64_t> posted;
  std::vector<std::uint64_t> folds;
  std::string aux;
};

inline ParsedRecord parse_record(const std::string& bytes) {
  ParsedRecord out;
  REQUIRE(bytes.size() >= sizeof(out.header) + 8);
  std::memcpy(&out.header, bytes.data(), sizeof(out.header));
  REQUIRE(out.header.magic == record::kMagic);
  std::uint64_t digest = 0;
  std::memcpy(&digest, bytes.data() + bytes.size() - 8, 8);
  REQUIRE(digest == digest::xxh3_64(bytes.data(), bytes.size() - 8));
  const char* at = bytes.data() + sizeof(out.header);
  out.groups.resize(out.header.n_groups);
  if (!out.groups.empty()) std::memcpy(out.groups.data(), at, out.groups.size() * sizeof(record::RecordGroup));
  at += out.groups.size() * sizeof(record::RecordGroup);
  for (std::uint64_t k = 0; k < out.header.n_chunks; ++k) {
    if ((static_cast<std::uint8_t>(at[k / 8]) >> (k % 8)) & 1) out.posted.insert(k);
  }
  at += (out.header.n_chunks + 63) / 64 * 8;
  out.folds.resize(out.header.n_folds);
  if (!out.folds.empty()) std::memcpy(out.folds.data(), at, out.folds.size() * 8);
  at += out.folds.size() * 8;
  out.aux.assign(at, out.header.aux_bytes);
  at += (out.header.aux_bytes + 7) / 8 * 8;
  REQUIRE(at + 8 == bytes.data() + bytes.size());
  REQUIRE(out.header.n_posted == out.posted.size());
  return out;
}

// Decode's end of a lane, read by hand.
class Reader {
 public:
  explicit Reader(int fd) : fd_(fd) {}
  ~Reader() { hang_up(); }
  Reader(Reader&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Reader& operator=(Reader&&) = delete;

  void hang_up() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  int fd() const { return fd_; }

  // False where nothing comes within the time given, or the peer is gone.
  bool read_bytes(void* out, std::size_t n, milliseconds patience = kPatience) {
    const auto until = Clock::now() + patience;
    auto* at = static_cast<char*>(out);
    while (n > 0) {
      const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now()).count();
      pollfd p{fd_, POLLIN, 0};
      if (left < 0 || poll(&p, 1, static_cast<int>(left)) <= 0) return false;
      const ssize_t got = recv(fd_, at, n, MSG_DONTWAIT);
      if (got <= 0) return false;
      at += got;
      n -= static_cast<std::size_t>(got);
    }
    return true;
  }
  std::optional<Frame> next(milliseconds patience = kPatience) {
    Frame frame;
    if (!read_bytes(&frame.header, sizeof(frame.header), patience)) return std::nullopt;
    REQUIRE(frame.header.magic == wire::kMagic);
    REQUIRE(frame.header.sequence == sequence_++);
    frame.body.resize(frame.header.body_bytes);
    if (!read_bytes(frame.body.data(), frame.body.size(), patience)) return std::nullopt;
    return frame;
  }
  bool silent(milliseconds patience = milliseconds(50)) {
    pollfd p{fd_, POLLIN, 0};
    return poll(&p, 1, static_cast<int>(patience.count())) == 0;
  }
  // All frames of the reservation up to and with its commit record.
  std::vector<Frame> until_record(std::uint64_t reservation) {
    std::vector<Frame> frames;
    for (;;) {
      std::optional<Frame> frame = next();
      REQUIRE(frame);
      if (frame->header.reservation != reservation) continue;
      frames.push_back(std::move(*frame));
      const Frame& last = frames.back();
      if (last.header.type != static_cast<std::uint16_t>(wire::FrameType::kRecord)) continue;
      if (parse_record(last.body).header.kind == static_cast<std::uint16_t>(record::Kind::kCommit)) return frames;
    }
  }
  void confirm(std::uint32_t lane, std::uint64_t reservation, std::uint32_t leg, std::uint64_t sequence) {
    wire::FrameHeader header{};
    header.magic = wire::kMagic;
    header.type = static_cast<std::uint16_t>(wire::FrameType::kConfirm);
    header.generation = kGeneration;
    header.lane = lane;
    header.sequence = sequence;
    header.reservation = reservation;
    header.leg = leg;
    REQUIRE(send(fd_, &header, sizeof(header), MSG_NOSIGNAL) == sizeof(header));
  }

 private:
  int fd_;
  std::uint64_t sequence_ = 0;
};

// A sender with one session and the other ends of its lanes.
class Prefill {
 public:
  explicit Prefill(const PoolMap& pool, std::uint32_t n_lanes = 1, LaneKind kind = LaneKind::kTcp,
                   std::uint64_t frame_bytes = wire::kFrameBytes)
      : sender(queue, pool, frame_bytes) {
    sender.open_session(kSession, kEpoch, kGeneration, n_lanes);
    for (std::uint32_t lane = 0; lane < n_lanes; ++lane) connect(lane, kind);
  }
  void connect(std::uint32_t lane, LaneKind kind, std::uint32_t generation = kGeneration) {
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    sender.add_lane(kSession, generation, lane, kind, fds[0]);
    readers.emplace_back(fds[1]);
  }
  // The next event of the kind; others are kept.
  std::optional<Completion> event(Kind kind, milliseconds patience = kPatience) {
    const auto until = Clock::now() + patience;
    for (;;) {
      const auto at = std::find_if(kept.begin(), kept.end(), [&](const Completion& c) { return c.kind == kind; });
      if (at != kept.end()) {
        Completion found = std::move(*at);
        kept.erase(at);
        return found;
      }
      const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now()).count();
      pollfd p{queue.fileno(), POLLIN, 0};
      if (left < 0 || poll(&p, 1, static_cast<int>(left)) <= 0) return std::nullopt;
      for (Completion& c : queue.drain()) kept.push_back(std::move(c));
    }
  }
  std::vector<std::uint64_t> drained_counts() {
    const auto drained = event(Kind::kLegDrained);
    REQUIRE(drained);
    std::vector<std::uint64_t> counts(drained->data.size() / 8);
    std::memcpy(counts.data(), drained->data.data(), drained->data.size());
    return counts;
  }

  CompletionQueue queue;
  Sender sender;
  std::vector<Reader> readers;
  std::vector<Completion> kept;
};

struct LegShape {
  std::uint64_t reservation = 100;
  std::uint32_t leg = 0;
  bool verify = true;
  bool carries_aux = false;
  std::vector<std::uint32_t> lanes{0};
};

inline LegOutSpec spec_of(const LegShape& shape) {
  return {kSession, kGeneration, shape.reservation, shape.leg, shape.verify, shape.carries_aux, shape.lanes};
}

inline void attach(SourceGrant& grant, const LegShape& shape, std::vector<Slice> slices,
                   std::vector<SourceGrant::AttachGroup> groups) {
  grant.attach(spec_of(shape), std::move(slices), std::move(groups));
}

// Chunks by (group, slice, page index), as they came in frames of a tcp lane.
using Chunks = std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>, std::string>;

inline void collect(const std::vector<Frame>& frames, Chunks& chunks) {
  for (const Frame& frame : frames) {
    if (frame.header.type != static_cast<std::uint16_t>(wire::FrameType::kWrite)) continue;
    const std::uint64_t chunk_bytes = frame.body.size() / frame.header.n_pages;
    REQUIRE(chunk_bytes * frame.header.n_pages == frame.body.size());
    for (std::uint32_t i = 0; i < frame.header.n_pages; ++i) {
      const bool fresh = chunks
                             .emplace(std::tuple(frame.header.group, frame.header.slice, frame.header.page_first + i),
                                      frame.body.substr(i * chunk_bytes, chunk_bytes))
                             .second;
      REQUIRE(fresh);
    }
  }
}

}  // namespace kvxfer::sender_test
