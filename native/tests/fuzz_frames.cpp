// Streams of damaged frames, from a fixed seed: whatever they say, no byte outside the leg's slices changes, and
// nothing counts as landed that is not there.
#include <sys/syscall.h>

#include <random>

#include "core/shared_memory.hpp"
#include "test_receiver_kit.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr std::uint64_t kPage = 256;
constexpr int kRounds = 800;

class Fuzzer {
 public:
  explicit Fuzzer(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t n) { return random_() % n; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }
  // Near the ends of ranges more often than anywhere else.
  std::uint64_t number() {
    constexpr std::uint64_t kEdges[] = {0, 1, 2, 3, 5, 6, 63, 64, 255, 256, 4096, 1ull << 20, 1ull << 32, ~0ull};
    return one_in(3) ? random_() : kEdges[below(std::size(kEdges))] - below(2);
  }
  void damage(std::string& bytes) {
    if (bytes.empty()) return;
    switch (below(4)) {
      case 0:
        bytes[below(bytes.size())] ^= static_cast<char>(1 << below(8));
        break;
      case 1:
        bytes.resize(below(bytes.size()));
        break;
      case 2:
        bytes.insert(below(bytes.size()), content(below(80), random_()));
        break;
      default:
        for (std::size_t i = below(bytes.size()), n = 0; i < bytes.size() && n < 8; ++i, ++n) {
          bytes[i] = static_cast<char>(random_());
        }
    }
  }
  void damage(wire::FrameHeader& h) {
    switch (below(11)) {
      case 0:
        h.magic = static_cast<std::uint32_t>(number());
        break;
      case 1:
        h.type = static_cast<std::uint16_t>(number());
        break;
      case 2:
        h.generation = static_cast<std::uint32_t>(number());
        break;
      case 3:
        h.lane = static_cast<std::uint32_t>(number());
        break;
      case 4:
        h.sequence = number();
        break;
      case 5:
        h.leg = static_cast<std::uint32_t>(number());
        break;
      case 6:
        h.group = static_cast<std::uint32_t>(number());
        break;
      case 7:
        h.slice = static_cast<std::uint32_t>(number());
        break;
      case 8:
        h.n_pages = static_cast<std::uint32_t>(number());
        break;
      case 9:
        h.page_first = number();
        break;
      default:
        h.body_bytes = number();
    }
  }

 private:
  std::mt19937_64 random_;
};

// Group 0: whole pages. Group 1: three runs of 40 bytes a page. Pages 1 and 2 of 4 are the leg's.
struct FuzzRig {
  FuzzRig()
      : pool({{{kPage, kPage, 4}, {kPage + 8, kPage, 4}}, {{kPage, kPage, 4}}}),
        receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes),
        events(cq) {
    const Slice strided{1, 0, 0, 0, 1, 3, 40, 0, 50, 16, 80};
    receiver.open_leg(kReservation, kLeg, true, pack({whole_page(0, 0, kPage), whole_page(0, 1, kPage), strided}),
                      {{0, 16, {0, 1}, {2, 1}}, {1, 0, {5, 6}, {1, 2}}});
  }
  std::uint64_t chunk_bytes(std::uint32_t group) const { return group == 0 ? kPage : 120; }

  void check_untouched() const {
    const std::string page = canaries(kPage);
    for (const std::uint64_t other : {0, 3}) {
      REQUIRE(pool.page(0, 0, other) == page);
      REQUIRE(pool.page(0, 1, other) == page);
      REQUIRE(pool.page(1, 0, other) == page);
    }
    for (const std::uint64_t own : {1, 2}) {
      std::string outside = pool.page(1, 0, own);
      for (const std::size_t run : {16, 96, 176}) outside.replace(run, 40, canaries(40));
      REQUIRE(outside == page);
    }
    const std::string stretch = pool.regions[1]->bytes();
    for (std::size_t gap = 0; gap < 3; ++gap) REQUIRE(stretch.substr(gap * (kPage + 8) + kPage, 8) == canaries(8));
  }

  CompletionQueue cq;
  Pool pool;
  Receiver receiver;
  Events events;
};

void run_round(Fuzzer& fuzz, const std::shared_ptr<const PeerMemory>& source) {
  FuzzRig rig;
  Peer peer(rig.receiver, 0, source);
  std::string stream;
  const std::uint64_t frames = 1 + fuzz.below(12);
  for (std::uint64_t i = 0; i < frames; ++i) {
    wire::FrameHeader h;
    std::string body =
        source ? raw(wire::SourceRef{fuzz.one_in(8) ? fuzz.number() : 1, fuzz.one_in(8) ? 1ull : 0}) : "";
    if (fuzz.one_in(5)) {
      std::string record =
          make_record(fuzz.one_in(2) ? record::Kind::kCommit : record::Kind::kProgress, 0, 6, 1, "aux");
      if (fuzz.one_in(2)) fuzz.damage(record);
      body += record;
      h = peer.header(wire::FrameType::kRecord, body.size());
    } else {
      const auto group = static_cast<std::uint32_t>(fuzz.below(2));
      const auto n = static_cast<std::uint32_t>(1 + fuzz.below(2));
      if (source) {
        for (std::uint32_t k = 0; k < n; ++k) body += raw(fuzz.one_in(6) ? fuzz.number() : fuzz.below(4));
      } else {
        body += content(n * rig.chunk_bytes(group), i);
      }
      h = peer.write_header(group, static_cast<std::uint32_t>(group == 0 ? fuzz.below(2) : 0),
                            n == 2 ? 0 : fuzz.below(2), n, body.size());
    }
    if (fuzz.one_in(6)) fuzz.damage(h);
    if (fuzz.one_in(12)) fuzz.damage(body);
    stream += raw(h) + body;
    if (fuzz.one_in(20)) stream += raw(h) + body;
  }
  if (fuzz.one_in(4)) fuzz.damage(stream);
  while (!stream.empty()) {
    const std::size_t n = 1 + fuzz.below(stream.size());
    if (!peer.send(stream.substr(0, n))) break;
    stream.erase(0, n);
  }
  peer.hang_up();
  const auto down = rig.events.wait(Kind::kLaneDown);
  REQUIRE(down.has_value());
  rig.check_untouched();
  const LegIn::Report report = rig.receiver.report(kReservation, kLeg);
  const auto digests = rig.receiver.digests(kReservation, kLeg);
  std::uint64_t landed = 0;
  for (std::size_t ordinal = 0; ordinal < digests.size(); ++ordinal) {
    const bool placed = (report.placed.at(0)[0] >> ordinal) & 1;
    CHECK(placed == (digests[ordinal] != 0));
    if (placed) landed += rig.chunk_bytes(ordinal < 4 ? 0 : 1);
  }
  CHECK(report.bytes_landed == landed);
}

}  // namespace

TEST_CASE("damaged frames on a tcp lane change nothing but the leg's own bytes") {
  Fuzzer fuzz(20'260'101);
  for (int round = 0; round < kRounds; ++round) {
    CAPTURE(round);
    run_round(fuzz, nullptr);
  }
}

TEST_CASE("damaged frames on a local lane change nothing but the leg's own bytes") {
  const SharedMemory memory(2 * 4 * kPage, "source"), table(4096, "table");
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  REQUIRE(pidfd >= 0);
  const std::vector<int> fds{memory.fd()};
  const std::vector<std::vector<PeerMemory::RegionClaim>> claims{
      {{0, 0, kPage, kPage, 4}, {0, 4 * kPage, kPage, kPage, 4}}};
  const auto source = std::make_shared<const PeerMemory>(getpid(), pidfd, claims, fds, table.fd(), 0, "");
  Fuzzer fuzz(20'260'102);
  for (int round = 0; round < kRounds; ++round) {
    CAPTURE(round);
    run_round(fuzz, source);
  }
  close(pidfd);
}
