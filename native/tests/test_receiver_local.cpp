// Decode's end of a local lane: it copies from prefill's pages, and counts nothing that may have changed meanwhile.
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <xxhash.h>

#include "core/error.hpp"
#include "core/shared_memory.hpp"
#include "test_receiver_kit.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr std::uint64_t kBytes = Rig::kPageBytes;
constexpr std::uint64_t kSlot = 5;
constexpr std::uint64_t kPinned = 41;
constexpr std::uint64_t kSourcePages = 8;
const std::string kProbe = "what the two sides agreed to look for";

std::uint64_t xxh3(const std::string& bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

int open_pidfd(pid_t pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  REQUIRE(fd >= 0);
  return fd;
}

// Another process, whose only job is to be alive.
class Child {
 public:
  Child() {
    char sleep[] = "sleep", seconds[] = "60";
    char* argv[] = {sleep, seconds, nullptr};
    REQUIRE(posix_spawnp(&pid_, "sleep", nullptr, nullptr, argv, environ) == 0);
    pidfd_ = open_pidfd(pid_);
  }
  ~Child() {
    kill();
    waitpid(pid_, nullptr, 0);
    close(pidfd_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  // Safe in a signal handler. Returns when the pidfd says so too.
  void kill() const {
    ::kill(pid_, SIGKILL);
    pollfd fd{pidfd_, POLLIN, 0};
    poll(&fd, 1, 10'000);
  }
  int pidfd() const { return pidfd_; }

 private:
  pid_t pid_ = -1;
  int pidfd_ = -1;
};

// Prefill's side: 8 pages in two regions, and the generation table.
struct Source {
  SharedMemory memory{2 * kSourcePages * kBytes, "source"};
  SharedMemory table{64 * sizeof(std::uint64_t), "table"};
  Child process;

  Source() {
    const std::string bytes = content(memory.nbytes(), 77);
    std::memcpy(memory.data(), bytes.data(), bytes.size());
    set_slot(kPinned);
  }
  void set_slot(std::uint64_t value) const {
    __atomic_store_n(reinterpret_cast<std::uint64_t*>(table.data()) + kSlot, value, __ATOMIC_RELEASE);
  }
  std::string page(std::uint64_t region, std::uint64_t index) const {
    return {reinterpret_cast<const char*>(memory.data()) + (region * kSourcePages + index) * kBytes, kBytes};
  }
  std::vector<std::vector<PeerMemory::RegionClaim>> claims(bool mapped) const {
    const std::uint64_t base = mapped ? 0 : reinterpret_cast<std::uint64_t>(memory.data());
    const int fd = mapped ? 0 : -1;
    return {
        {{fd, base, kBytes, kBytes, kSourcePages}, {fd, base + kSourcePages * kBytes, kBytes, kBytes, kSourcePages}}};
  }
  // Where it is not mapped, the memory read is this process's own.
  std::shared_ptr<const PeerMemory> open(bool mapped) const {
    const std::vector<int> fds(mapped ? 1 : 0, memory.fd());
    return std::make_shared<const PeerMemory>(getpid(), process.pidfd(), claims(mapped), fds, table.fd(),
                                              reinterpret_cast<std::uint64_t>(kProbe.data()), kProbe);
  }
};

std::string local_body(const std::vector<std::uint64_t>& pages, std::uint64_t slot = kSlot,
                       std::uint64_t expected = kPinned) {
  std::string body = raw(wire::SourceRef{slot, expected});
  for (const std::uint64_t page : pages) body += raw(page);
  return body;
}

std::string local_record(std::uint64_t expected = kPinned) {
  return raw(wire::SourceRef{kSlot, expected}) + make_record();
}

// A leg of three pages of 4 KiB, of which the second one can be made to trip.
struct TripRig {
  static constexpr std::uint64_t kPage = 4096;
  explicit TripRig(const Source& source, bool mapped, bool verify)
      : pool({{{kPage, kPage, 3}}}),
        receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes),
        events(cq) {
    const std::uint64_t base = mapped ? 0 : reinterpret_cast<std::uint64_t>(source.memory.data());
    const std::vector<int> fds(mapped ? 1 : 0, source.memory.fd());
    const std::vector<std::vector<PeerMemory::RegionClaim>> claims{{{mapped ? 0 : -1, base, kPage, kPage, 2}}};
    memory = std::make_shared<const PeerMemory>(getpid(), source.process.pidfd(), claims, fds, source.table.fd(),
                                                reinterpret_cast<std::uint64_t>(kProbe.data()), kProbe);
    receiver.open_leg(kReservation, kLeg, verify, pack({whole_page(0, 0, kPage)}), {{0, 16, {0, 1, 2}, {0, 1, 2}}});
  }
  CompletionQueue cq;
  Pool pool;
  Receiver receiver;
  Events events;
  std::shared_ptr<const PeerMemory> memory;
};

}  // namespace

TEST_CASE("chunks are copied from prefill's pages, digested, and the record is confirmed") {
  const Source source;
  for (const bool mapped : {true, false}) {
    for (const bool verify : {true, false}) {
      CAPTURE(mapped);
      Rig rig(verify);
      const auto memory = source.open(mapped);
      CHECK(std::string(memory->how()) == (mapped ? "mapped" : "process_vm_readv"));
      Peer peer(rig.receiver, 0, memory);
      peer.write(0, 0, 0, 3, local_body({7, 0, 5}));
      peer.write(0, 1, 1, 1, local_body({2}));
      peer.record(local_record());
      const auto event = rig.events.wait(Kind::kRecord);
      REQUIRE(event.has_value());
      CHECK(event->data == make_record());
      CHECK(rig.pool.page(0, 0, 4) == source.page(0, 7));
      CHECK(rig.pool.page(0, 0, 1) == source.page(0, 0));
      CHECK(rig.pool.page(0, 0, 3) == source.page(0, 5));
      CHECK(rig.pool.page(0, 1, 1) == source.page(1, 2));
      CHECK(rig.pool.page(0, 1, 4) == canaries(kBytes));
      CHECK(rig.report().placed.at(0) == std::string(1, '\x1d'));
      if (verify) CHECK(rig.receiver.digests(kReservation, kLeg)[3] == xxh3(source.page(1, 2)));

      const auto confirm = peer.receive();
      REQUIRE(confirm.has_value());
      CHECK(confirm->magic == wire::kMagic);
      CHECK(confirm->type == static_cast<std::uint16_t>(wire::FrameType::kConfirm));
      CHECK(confirm->generation == kGeneration);
      CHECK(confirm->sequence == 0);
      CHECK(confirm->reservation == kReservation);
      CHECK(confirm->leg == kLeg);
      CHECK(confirm->body_bytes == 0);
    }
  }
}

TEST_CASE("runs are picked from prefill's page and laid into decode's, whatever their strides") {
  const Source source;
  struct Shape {
    std::uint32_t runs;
    std::uint64_t run, src_offset, src_stride, dst_offset, dst_stride;
  };
  for (const bool mapped : {true, false}) {
    for (const Shape& s : {Shape{4, 16, 8, 128, 0, 16}, Shape{4, 16, 0, 16, 32, 100}, Shape{5, 3, 1, 100, 2, 7},
                           Shape{1, 100, 50, 0, 20, 0}, Shape{2, 256, 0, 256, 0, 256}}) {
      CAPTURE(s.run);
      Pool pool({{{kBytes, kBytes, 2}}});
      CompletionQueue cq;
      Receiver receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes);
      Events events(cq);
      const Slice slice{0, 0, 0, 0, 1, s.runs, s.run, s.src_offset, s.src_stride, s.dst_offset, s.dst_stride};
      receiver.open_leg(kReservation, kLeg, true, pack({slice}), {{0, 16, {0, 1}, {1, 0}}});
      Peer peer(receiver, 0, source.open(mapped));
      peer.write(0, 0, 0, 2, local_body({6, 3}));
      peer.record(local_record());
      REQUIRE(events.wait(Kind::kRecord).has_value());
      for (std::uint64_t k = 0; k < 2; ++k) {
        const std::string from = source.page(1, k == 0 ? 6 : 3);
        std::string expected = canaries(kBytes), chunk;
        for (std::uint32_t r = 0; r < s.runs; ++r) {
          const std::string run = from.substr(s.src_offset + r * s.src_stride, s.run);
          expected.replace(s.dst_offset + r * s.dst_stride, s.run, run);
          chunk += run;
        }
        CHECK(pool.page(0, 0, 1 - k) == expected);
        CHECK(receiver.digests(kReservation, kLeg)[k] == xxh3(chunk));
      }
    }
  }
}

TEST_CASE("chunks larger than a piece are copied whole") {
  constexpr std::uint64_t kBig = (600u << 10) + 5;
  SharedMemory memory(2 * kBig, "source");
  const std::string bytes = content(2 * kBig, 5);
  std::memcpy(memory.data(), bytes.data(), bytes.size());
  const Source source;
  for (const bool mapped : {true, false}) {
    const std::uint64_t base = mapped ? 0 : reinterpret_cast<std::uint64_t>(memory.data());
    const std::vector<int> fds(mapped ? 1 : 0, memory.fd());
    const std::vector<std::vector<PeerMemory::RegionClaim>> claims{{{mapped ? 0 : -1, base, kBig, kBig, 2}}};
    Pool pool({{{kBig, kBig, 2}}});
    CompletionQueue cq;
    Receiver receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes);
    Events events(cq);
    receiver.open_leg(kReservation, kLeg, true, pack({whole_page(0, 0, kBig)}), {{0, 16, {0, 1}, {0, 1}}});
    Peer peer(receiver, 0,
              std::make_shared<const PeerMemory>(getpid(), source.process.pidfd(), claims, fds, source.table.fd(),
                                                 reinterpret_cast<std::uint64_t>(kProbe.data()), kProbe));
    peer.write(0, 0, 0, 2, local_body({1, 0}));
    peer.record(local_record());
    REQUIRE(events.wait(Kind::kRecord).has_value());
    CHECK(pool.page(0, 0, 0) == bytes.substr(kBig));
    CHECK(pool.page(0, 0, 1) == bytes.substr(0, kBig));
    CHECK(receiver.digests(kReservation, kLeg)[0] == xxh3(bytes.substr(kBig)));
  }
}

TEST_CASE("what is read after its slot moved on does not count, and the leg hears of it once") {
  const Source source;
  Rig rig;
  Peer peer(rig.receiver, 0, source.open(true));
  peer.write(0, 0, 0, 1, local_body({7}));
  peer.write(0, 0, 1, 1, local_body({0}, kSlot, kPinned - 1));
  peer.write(0, 0, 2, 1, local_body({0}, 64));
  peer.write(0, 1, 0, 1, local_body({0}, ~0ull));
  peer.write(0, 1, 1, 1, local_body({1}));
  peer.record(local_record());
  REQUIRE(rig.events.wait(Kind::kRecord).has_value());
  CHECK(starts_with(rig.events.text(Kind::kViolation), "source: slot 5"));
  CHECK(rig.events.none(Kind::kViolation));
  CHECK(rig.report().placed.at(0) == std::string(1, '\x09'));
  CHECK(rig.report().violations == 1);
}

TEST_CASE("a slot that moves on in mid-copy takes the whole frame with it") {
  const Source source;
  for (const bool mapped : {true, false}) {
    for (const bool verify : {true, false}) {
      source.set_slot(kPinned);
      TripRig rig(source, mapped, verify);
      const Tripwire trip(rig.pool.map.groups[0][0].page(1), TripRig::kPage, [&] { source.set_slot(kPinned + 1); });
      Peer peer(rig.receiver, 0, rig.memory);
      peer.write(0, 0, 0, 2, local_body({1, 0}));
      CHECK(starts_with(rig.events.text(Kind::kViolation), "source: slot 5"));
      // A record that came from a pinned time is not believed either.
      peer.record(local_record());
      peer.hang_up();
      CHECK(rig.events.text(Kind::kLaneDown) == "eof");
      CHECK(rig.events.none(Kind::kRecord));
      CHECK(rig.receiver.report(kReservation, kLeg).placed.at(0) == std::string(1, '\0'));
      CHECK(rig.receiver.report(kReservation, kLeg).violations == 1);
    }
  }
}

TEST_CASE("a prefill that dies in mid-copy takes the whole frame with it") {
  const Source source;
  TripRig rig(source, true, true);
  const Tripwire trip(rig.pool.map.groups[0][0].page(1), TripRig::kPage, [&] { source.process.kill(); });
  Peer peer(rig.receiver, 0, rig.memory);
  peer.write(0, 0, 0, 2, local_body({1, 0}));
  CHECK(starts_with(rig.events.text(Kind::kViolation), "source: process"));
  CHECK(rig.receiver.report(kReservation, kLeg).placed.at(0) == std::string(1, '\0'));
}

TEST_CASE("a record of a dead prefill is not handed on") {
  const Source source;
  Rig rig;
  Peer peer(rig.receiver, 0, source.open(true));
  peer.write(0, 0, 0, 1, local_body({7}));
  peer.record(raw(wire::SourceRef{kSlot, kPinned}) + make_record(record::Kind::kProgress));
  peer.wait_taken();
  source.process.kill();
  peer.record(local_record());
  CHECK(starts_with(rig.events.text(Kind::kViolation), "source: process"));
  CHECK(rig.events.none(Kind::kRecord));
}

TEST_CASE("a leg revoked in mid-copy gets nothing more") {
  const Source source;
  TripRig rig(source, true, true);
  std::atomic<bool> tripped{false}, revoked{false}, revoked_inside{false};
  std::thread revoker([&] {
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    while (!tripped && Clock::now() < deadline) std::this_thread::yield();
    rig.receiver.revoke(kReservation, kLeg);
    revoked = true;
  });
  {
    // Inside the copy the gate is held: the revoke cannot return before the piece is in.
    const Tripwire trip(rig.pool.map.groups[0][0].page(1), TripRig::kPage, [&] {
      tripped = true;
      const auto until = Clock::now() + milliseconds(30);
      while (Clock::now() < until) {
        if (revoked) revoked_inside = true;
      }
    });
    Peer peer(rig.receiver, 0, rig.memory);
    peer.write(0, 0, 0, 3, local_body({1, 0, 1}));
    const std::string record = local_record();
    peer.record(record);
    CHECK(starts_with(rig.events.text(Kind::kViolation), "record: of a revoked leg"));
    revoker.join();
    CHECK_FALSE(revoked_inside.load());
    CHECK(rig.pool.page(0, 0, 2) == canaries(TripRig::kPage));
    CHECK(rig.receiver.report(kReservation, kLeg).bytes_landed == 0);
    // Its sources are not read any more, and prefill may know.
    CHECK(peer.receive().has_value());
  }
}

TEST_CASE("a frame that names memory prefill does not have is a violation and copies nothing") {
  const Source source;
  Rig rig;
  std::uint32_t slice = 0;
  std::vector<std::uint64_t> pages{0};
  std::vector<Slice> slices{whole_page(0, 0, kBytes)};
  SUBCASE("page beyond the last") { pages = {kSourcePages}; }
  SUBCASE("page near 2^64") { pages = {~0ull}; }
  SUBCASE("region") { slices[0].src_region = 2; }
  SUBCASE("group") { slices[0].src_group = 1; }
  SUBCASE("offset") { slices[0].src_offset = 1; }
  SUBCASE("offset near 2^64") { slices[0].src_offset = ~0ull; }
  SUBCASE("stride near 2^64") {
    slices[0].runs = 2, slices[0].run_bytes = 8, slices[0].dst_stride = 8, slices[0].src_stride = ~0ull - 3;
  }
  rig.receiver.forget(kReservation, kLeg);
  rig.receiver.open_leg(kReservation, kLeg, true, pack(slices), {{0, 16, {0}, {0}}});
  Peer peer(rig.receiver, 0, source.open(true));
  peer.write(0, slice, 0, 1, local_body(pages));
  CHECK(starts_with(rig.events.text(Kind::kViolation), "bounds: "));
  CHECK(rig.pool.everything() == canaries(rig.pool.everything().size()));
  CHECK(rig.report().bytes_landed == 0);
}

TEST_CASE("a local frame whose page list has another length takes the lane down") {
  const Source source;
  Rig rig;
  Peer peer(rig.receiver, 0, source.open(true));
  peer.write(0, 0, 0, 2, local_body({1}));
  CHECK(starts_with(rig.events.text(Kind::kLaneDown), "violation: frame: body"));
}

TEST_CASE("memory that process_vm_readv cannot read fails the leg") {
  const Source source;
  Rig rig;
  GuardedRegion region(4096);
  const std::vector<std::vector<PeerMemory::RegionClaim>> claims{
      {{-1, reinterpret_cast<std::uint64_t>(region.data()), kBytes, kBytes, 1000}}};
  const auto memory =
      std::make_shared<const PeerMemory>(getpid(), source.process.pidfd(), claims, std::vector<int>{},
                                         source.table.fd(), reinterpret_cast<std::uint64_t>(kProbe.data()), kProbe);
  Peer peer(rig.receiver, 0, memory);
  peer.write(0, 0, 0, 1, local_body({8}));
  CHECK(starts_with(rig.events.text(Kind::kViolation), "source: process_vm_readv"));
  CHECK(rig.report().bytes_landed == 0);
}

TEST_CASE("memory of the peer is accepted only as it was claimed") {
  const Source source;
  auto claims = source.claims(true);
  std::vector<int> fds{source.memory.fd()};
  std::uint64_t probe_ptr = reinterpret_cast<std::uint64_t>(kProbe.data());
  std::string probe = kProbe;
  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(ftruncate(unsealed, static_cast<off_t>(source.memory.nbytes())) == 0);
  int table = source.table.fd();
  const std::string other = "something else in the same place.....";
  SUBCASE("not sealed against shrinking") { fds = {unsealed}; }
  SUBCASE("no memfd at all") { fds = {source.process.pidfd()}; }
  SUBCASE("no descriptor") { fds = {-1}; }
  SUBCASE("a table that is not sealed") { table = unsealed; }
  SUBCASE("a region one byte longer than its memfd") { claims[0][1].page_bytes += 1; }
  SUBCASE("a region that starts behind its memfd") { claims[0][0].at = source.memory.nbytes(); }
  SUBCASE("a size that wraps") { claims[0][0].page_stride = ~0ull / 2; }
  SUBCASE("a memfd that was not given") { claims[0][0].fd = 1; }
  SUBCASE("a probe that reads back otherwise") {
    claims = source.claims(false);
    probe_ptr = reinterpret_cast<std::uint64_t>(other.data());
  }
  SUBCASE("a probe that cannot be read") {
    claims = source.claims(false);
    probe_ptr = 8;
  }
  SUBCASE("no probe where one is needed") {
    claims = source.claims(false);
    probe.clear();
  }
  CHECK_THROWS_AS(PeerMemory(getpid(), source.process.pidfd(), claims, fds, table, probe_ptr, probe), Error);
  close(unsealed);
}

TEST_CASE("mapped memory needs no process_vm_readv") {
  const Source source;
  const std::vector<int> fds{source.memory.fd()};
  const PeerMemory memory(getpid(), source.process.pidfd(), source.claims(true), fds, source.table.fd(), 8,
                          "unreadable");
  CHECK(std::string(memory.how()) == "mapped");
  auto claims = source.claims(true);
  claims[0][1] = source.claims(false)[0][1];
  const PeerMemory mixed(getpid(), source.process.pidfd(), claims, fds, source.table.fd(),
                         reinterpret_cast<std::uint64_t>(kProbe.data()), kProbe);
  CHECK(std::string(mixed.how()) == "mixed");
}

TEST_CASE("fence ends a local lane whose peer takes no confirmations") {
  const Source source;
  Rig rig;
  Peer peer(rig.receiver, 0, source.open(true));
  // Records of a leg nobody knows are confirmed as well: enough of them to fill the socket.
  std::thread flood([&] {
    for (int i = 0; i < 20'000; ++i) {
      const std::string record = local_record();
      wire::FrameHeader h = peer.header(wire::FrameType::kRecord, record.size());
      h.leg = 9;
      if (!peer.send(raw(h) + record)) return;
    }
  });
  std::this_thread::sleep_for(milliseconds(50));
  const auto start = Clock::now();
  rig.receiver.fence();
  CHECK(Clock::now() - start < milliseconds(1000));
  flood.join();
}
