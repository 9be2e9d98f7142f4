// Both cores against each other: what one says it posted is what the other saw land, on every lane and layout.
#include <sys/syscall.h>

#include <map>
#include <random>

#include "core/shared_memory.hpp"
#include "lanes/sender.hpp"
#include "test_receiver_kit.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr std::uint64_t kPage = 24 * 1024;
constexpr std::uint64_t kPoolPages = 16;
constexpr std::uint32_t kLanes = 2;
const std::string kProbe = "is it you";

enum class Way { kTcp, kMapped, kReadv };

// A sender and a receiver in one process, joined by two lanes.
struct Pair {
  explicit Pair(Way way)
      : memory(2 * kPoolPages * kPage, "prefill"),
        pool({{{kPage, kPage, kPoolPages}, {kPage, kPage, kPoolPages}}}),
        sender(sent, source_map()),
        receiver(landed, pool.map, kSession, kEpoch, kGeneration, 1 << 16),
        events(landed),
        sender_events(sent) {
    const std::string bytes = content(memory.nbytes(), 3);
    std::memcpy(memory.data(), bytes.data(), bytes.size());
    std::shared_ptr<const PeerMemory> source;
    if (way != Way::kTcp) source = open_memory(way == Way::kMapped);
    sender.open_session(kSession, kEpoch, kGeneration, kLanes);
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      int ends[2];
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
      sender.add_lane(kSession, kGeneration, lane, source ? LaneKind::kLocal : LaneKind::kTcp, ends[0]);
      receiver.add_lane(lane, source ? "local" : "tcp", ends[1], source);
    }
  }
  ~Pair() {
    receiver.fence();
    sender.close();
  }

  PoolMap source_map() const {
    return {
        {{{memory.data(), kPage, kPage, kPoolPages}, {memory.data() + kPoolPages * kPage, kPage, kPage, kPoolPages}}}};
  }
  std::shared_ptr<const PeerMemory> open_memory(bool mapped) const {
    const std::uint64_t at = mapped ? 0 : reinterpret_cast<std::uint64_t>(memory.data());
    const int fd = mapped ? 0 : -1;
    const std::vector<std::vector<PeerMemory::RegionClaim>> claims{
        {{fd, at, kPage, kPage, kPoolPages}, {fd, at + kPoolPages * kPage, kPage, kPage, kPoolPages}}};
    const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
    const std::vector<int> fds(mapped ? 1 : 0, memory.fd());
    auto source = std::make_shared<const PeerMemory>(getpid(), pidfd, claims, fds, sender.generation_table_fd(),
                                                     reinterpret_cast<std::uint64_t>(kProbe.data()), kProbe);
    close(pidfd);
    return source;
  }
  std::string source_page(std::uint64_t region, std::uint64_t page) const {
    return {reinterpret_cast<const char*>(memory.data()) + (region * kPoolPages + page) * kPage, kPage};
  }

  SharedMemory memory;
  Pool pool;
  CompletionQueue sent, landed;
  Sender sender;
  Receiver receiver;
  Events events, sender_events;
};

LegOutSpec spec(std::uint64_t reservation, bool verify) {
  return {kSession, kGeneration, reservation, kLeg, verify, true, {0, 1}};
}

// The parts of a record that the cores must agree upon.
struct ReadRecord {
  explicit ReadRecord(const std::string& bytes) {
    std::memcpy(&header, bytes.data(), sizeof(header));
    std::size_t at = sizeof(header) + header.n_groups * sizeof(record::RecordGroup);
    bitmap = bytes.substr(at, (header.n_chunks + 7) / 8);
    at += (header.n_chunks + 63) / 64 * 8;
    folds.resize(header.n_folds);
    if (!folds.empty()) std::memcpy(folds.data(), bytes.data() + at, folds.size() * 8);
    aux = bytes.substr(at + folds.size() * 8, header.aux_bytes);
  }
  record::RecordHeader header;
  std::string bitmap;
  std::vector<std::uint64_t> folds;
  std::string aux;
};

}  // namespace

TEST_CASE("what the sender's records claim is what the receiver saw land, on every lane and layout") {
  // The second region's slice is three runs with other strides on either side.
  const Slice strided{0, 1, 0, 0, 1, 3, 5000, 100, 8000, 0, 5000};
  for (const Way way : {Way::kTcp, Way::kMapped, Way::kReadv}) {
    for (const bool verify : {true, false}) {
      CAPTURE(static_cast<int>(way));
      CAPTURE(verify);
      Pair pair(way);
      std::vector<std::uint64_t> logical, from, to;
      for (std::uint64_t k = 0; k < 10; ++k) logical.push_back(k), from.push_back((k * 7) % 16), to.push_back(15 - k);
      const std::vector<Slice> slices{whole_page(0, 0, kPage), strided};
      const std::string before = pair.pool.page(0, 1, 15);
      pair.receiver.open_leg(kReservation, kLeg, verify, pack(slices), {{0, 16, logical, to}});
      const auto grant = pair.sender.grant(1, true);
      // One region before the leg is there, one after.
      const std::vector<std::uint32_t> first{0}, second{1};
      grant->write(0, logical, from, first, false);
      grant->attach(spec(kReservation, verify), slices, {{0, 16, 0, logical}});
      grant->write(0, logical, from, second, true);
      grant->commit(160, "aux");

      std::map<int, std::string> claimed;
      std::vector<std::uint64_t> folds;
      std::string aux;
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        const auto event = pair.events.wait(Kind::kRecord);
        REQUIRE(event.has_value());
        const ReadRecord record(event->data);
        claimed[event->lane] = record.bitmap;
        if (event->lane == 0) folds = record.folds, aux = record.aux;
      }
      const LegIn::Report report = pair.receiver.report(kReservation, kLeg);
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) CHECK(report.placed.at(lane) == claimed.at(lane));
      CHECK(report.folds == folds);
      CHECK(aux == "aux");
      CHECK(report.violations == 0);
      CHECK(report.bytes_landed == 10 * (kPage + 15'000));
      for (std::uint64_t k = 0; k < 10; ++k) {
        CHECK(pair.pool.page(0, 0, to[k]) == pair.source_page(0, from[k]));
        std::string expected = before;
        for (int run = 0; run < 3; ++run) {
          expected.replace(run * 5000, 5000, pair.source_page(1, from[k]), 100 + run * 8000, 5000);
        }
        CHECK(pair.pool.page(0, 1, to[k]) == expected);
      }
      CHECK(pair.sender_events.wait(Kind::kLegDrained).has_value());
      grant->close();
    }
  }
}

TEST_CASE("pages of a revoked leg belong to the next one, whatever its sender still does") {
  for (const Way way : {Way::kTcp, Way::kMapped}) {
    Pair pair(way);
    std::mt19937_64 random(11);
    const std::vector<std::uint64_t> logical{0, 1, 2, 3, 4, 5, 6, 7};
    const std::vector<Slice> slices{whole_page(0, 0, kPage), whole_page(0, 1, kPage)};
    const std::vector<std::uint32_t> regions{0, 1};
    std::vector<std::unique_ptr<SourceGrant>> grants;
    std::uint64_t complete = 0;
    for (std::uint64_t round = 0; round < 60; ++round) {
      const std::uint64_t reservation = 1000 + round;
      pair.receiver.open_leg(reservation, kLeg, true, pack(slices), {{0, 16, logical, logical}});
      auto grant = pair.sender.grant(reservation, true);
      grant->attach(spec(reservation, true), slices, {{0, 16, 0, logical}});
      std::vector<std::uint64_t> from(8);
      for (std::uint64_t k = 0; k < 8; ++k) from[k] = (k + round) % kPoolPages;
      const bool abort = random() % 2 == 0;
      std::thread revoker([&] {
        if (!abort) return;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
        pair.receiver.revoke(reservation, kLeg);
      });
      grant->write(0, logical, from, regions, false);
      grant->commit(128, "");
      revoker.join();
      if (!abort) {
        int records = 0;
        while (records < 2) {
          const auto event = pair.events.wait(Kind::kRecord);
          REQUIRE(event.has_value());
          if (event->reservation == reservation) ++records;
        }
        const auto report = pair.receiver.report(reservation, kLeg);
        CHECK(report.bytes_landed == 16 * kPage);
        CHECK(report.violations == 0);
        for (std::uint64_t k = 0; k < 8; ++k) {
          for (std::uint64_t r : {0, 1}) REQUIRE(pair.pool.page(0, r, k) == pair.source_page(r, from[k]));
        }
        ++complete;
      }
      pair.receiver.forget(reservation, kLeg);
      grants.push_back(std::move(grant));
    }
    CHECK(complete > 10);
    CHECK(pair.events.none(Kind::kLaneDown));
    for (auto& grant : grants) grant->close();
  }
}
