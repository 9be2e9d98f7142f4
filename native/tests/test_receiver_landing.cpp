// Decode's end of a tcp lane: what lands, and where.
#include <xxhash.h>

#include "test_receiver_kit.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr std::uint64_t kBytes = Rig::kPageBytes;

std::uint64_t xxh3(const std::string& bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace

TEST_CASE("a leg's chunks land in its pages and nowhere else, with their digests") {
  Rig rig;
  Peer peer(rig.receiver, 0);
  const std::string a = content(kBytes, 1), b = content(kBytes, 2), c = content(kBytes, 3), d = content(kBytes, 4);
  peer.write(0, 0, 0, 2, a + b);
  peer.write(0, 1, 2, 1, c);
  peer.write(0, 1, 0, 1, d);
  const std::string record = make_record();
  peer.record(record);
  const auto event = rig.events.wait(Kind::kRecord);
  REQUIRE(event.has_value());
  CHECK(event->data == record);
  CHECK(event->session == kSession);
  CHECK(event->generation == kGeneration);
  CHECK(event->lane == 0);
  CHECK(event->reservation == kReservation);
  CHECK(event->leg == kLeg);

  CHECK(rig.pool.page(0, 0, 4) == a);
  CHECK(rig.pool.page(0, 0, 1) == b);
  CHECK(rig.pool.page(0, 1, 3) == c);
  CHECK(rig.pool.page(0, 1, 4) == d);
  for (const std::uint64_t other : {0, 2, 5}) CHECK(rig.pool.page(0, 0, other) == canaries(kBytes));
  CHECK(rig.pool.page(0, 0, 3) == canaries(kBytes));

  // Ordinals: page index times two slices, plus the slice.
  const auto digests = rig.receiver.digests(kReservation, kLeg);
  CHECK(digests == std::vector<std::uint64_t>{xxh3(a), xxh3(d), xxh3(b), 0, 0, xxh3(c)});
  const LegIn::Report report = rig.report();
  CHECK(report.placed.at(0) == std::string(1, '\x27'));
  CHECK(report.bytes_landed == 4 * kBytes);
  CHECK(report.violations == 0);
  CHECK(rig.events.none(Kind::kViolation));
}

TEST_CASE("without verify chunks land undigested and there are no folds") {
  Rig rig(false);
  Peer peer(rig.receiver, 0);
  peer.write(0, 0, 0, 1, content(kBytes, 1));
  rig.barrier(peer);
  CHECK(rig.pool.page(0, 0, 4) == content(kBytes, 1));
  CHECK(rig.report().folds.empty());
  CHECK(rig.report().placed.at(0) == std::string(1, '\x01'));
  CHECK(rig.receiver.digests(kReservation, kLeg) == std::vector<std::uint64_t>(6, 0));
}

TEST_CASE("chunks of any size land whole, however the stream is cut") {
  for (const bool verify : {true, false}) {
    for (const std::uint64_t bytes : {1u, 3u, 1023u, 1025u, 4096u, 65'537u, 300'001u, 1u << 20, (1u << 20) + 777}) {
      CAPTURE(bytes);
      const std::uint64_t n = bytes > 100'000 ? 2 : 5;
      Pool pool({{{bytes, bytes, n}}});
      CompletionQueue cq;
      Receiver receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes);
      Events events(cq);
      std::vector<std::uint64_t> pages(n), logical(n);
      for (std::uint64_t k = 0; k < n; ++k) logical[k] = k, pages[k] = n - 1 - k;
      receiver.open_leg(kReservation, kLeg, verify, pack({whole_page(0, 0, bytes)}), {{0, 16, logical, pages}});
      Peer peer(receiver, 0);
      std::string stream;
      const std::uint32_t per_frame = bytes > 100'000 ? 1 : 5;
      for (std::uint64_t k = 0; k < n; k += per_frame) {
        std::string body;
        for (std::uint64_t i = 0; i < per_frame; ++i) body += content(bytes, k + i);
        stream += raw(peer.write_header(0, 0, k, per_frame, body.size())) + body;
      }
      for (std::size_t at = 0, cut = 1; at < stream.size(); at += cut, cut = cut * 3 + 1) {
        peer.send(stream.substr(at, cut));
        if (cut < 2000) peer.wait_taken();
      }
      peer.record(make_record());
      REQUIRE(events.wait(Kind::kRecord).has_value());
      const auto digests = receiver.digests(kReservation, kLeg);
      for (std::uint64_t k = 0; k < n; ++k) {
        CHECK(pool.page(0, 0, n - 1 - k) == content(bytes, k));
        if (verify) CHECK(digests[k] == xxh3(content(bytes, k)));
      }
      CHECK(receiver.report(kReservation, kLeg).bytes_landed == n * bytes);
    }
  }
}

TEST_CASE("a strided slice fills its runs and leaves the bytes between them alone") {
  for (const std::uint64_t run : {4u, 100u, 2048u, 5000u}) {
    CAPTURE(run);
    const std::uint64_t stride = 2 * run + 8, page = 3 * stride;
    Pool pool({{{page, page, 2}}});
    CompletionQueue cq;
    Receiver receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes);
    Events events(cq);
    Slice slice = whole_page(0, 0, page);
    slice.runs = 3, slice.run_bytes = run, slice.dst_offset = 8, slice.dst_stride = stride;
    receiver.open_leg(kReservation, kLeg, true, pack({slice}), {{0, 16, {0, 1}, {1, 0}}});
    Peer peer(receiver, 0);
    const std::string a = content(3 * run, 1), b = content(3 * run, 2);
    peer.write(0, 0, 0, 2, a + b);
    peer.record(make_record());
    REQUIRE(events.wait(Kind::kRecord).has_value());
    for (std::uint64_t k = 0; k < 2; ++k) {
      std::string expected = canaries(page);
      for (std::uint64_t r = 0; r < 3; ++r) expected.replace(8 + r * stride, run, (k == 0 ? a : b), r * run, run);
      CHECK(pool.page(0, 0, 1 - k) == expected);
    }
    CHECK(receiver.digests(kReservation, kLeg) == std::vector<std::uint64_t>{xxh3(a), xxh3(b)});
  }
}

TEST_CASE("lanes share a leg, and each has its own bitmap") {
  Rig rig;
  Peer first(rig.receiver, 0), second(rig.receiver, 5);
  first.write(0, 0, 0, 1, content(kBytes, 1));
  second.write(0, 0, 1, 2, content(2 * kBytes, 2));
  rig.barrier(first);
  rig.barrier(second);
  const auto report = rig.report();
  CHECK(report.placed.at(0) == std::string(1, '\x01'));
  CHECK(report.placed.at(5) == std::string(1, '\x14'));
}

TEST_CASE("a leg with nothing to write needs only its records") {
  Rig rig;
  rig.receiver.open_leg(5, 0, true, "", {{0, 16, {}, {}}});
  Peer peer(rig.receiver, 0);
  const std::string record = make_record();
  wire::FrameHeader h = peer.header(wire::FrameType::kRecord, record.size());
  h.reservation = 5, h.leg = 0;
  peer.send(raw(h) + record);
  REQUIRE(rig.events.wait(Kind::kRecord).has_value());
  const auto report = rig.receiver.report(5, 0);
  CHECK(report.placed.at(0).empty());
  CHECK(report.folds.empty());
}

TEST_CASE("one million chunks of one byte") {
  constexpr std::uint64_t kPages = 1'000'000;
  Pool pool({{{1, 1, kPages}}});
  CompletionQueue cq;
  Receiver receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes);
  Events events(cq);
  std::vector<std::uint64_t> pages(kPages);
  for (std::uint64_t k = 0; k < kPages; ++k) pages[k] = k;
  receiver.open_leg(kReservation, kLeg, true, pack({whole_page(0, 0, 1)}), {{0, 16, pages, pages}});
  Peer peer(receiver, 0);
  const std::string bytes = content(kPages, 1);
  for (std::uint64_t k = 0; k < kPages; k += 4000) peer.write(0, 0, k, 4000, bytes.substr(k, 4000));
  peer.record(make_record());
  REQUIRE(events.wait(Kind::kRecord).has_value());
  CHECK(pool.everything() == bytes);
  const auto report = receiver.report(kReservation, kLeg);
  CHECK(report.placed.at(0) == std::string(kPages / 8, '\xff'));
  CHECK(report.folds.size() == kPages / 4);
}
