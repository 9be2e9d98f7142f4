// Decode's end of a tcp lane: what it refuses, and what never lands.
#include <xxhash.h>

#include "core/error.hpp"
#include "test_receiver_kit.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr std::uint64_t kBytes = Rig::kPageBytes;

std::uint64_t xxh3(const std::string& bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace

TEST_CASE("a fold covers the bound digests of its pages, and is 0 while one of them is missing") {
  Rig rig;
  Peer peer(rig.receiver, 0), last(rig.receiver, 1);
  std::vector<std::string> chunks;
  for (std::uint64_t i = 0; i < 6; ++i) chunks.push_back(content(kBytes, i));
  for (std::uint32_t i = 0; i < 5; ++i) peer.write(0, i % 2, i / 2, 1, chunks[i]);
  rig.barrier(peer);
  CHECK(rig.report().folds == std::vector<std::uint64_t>{0});

  last.write(0, 1, 2, 1, chunks[5]);
  rig.barrier(last);
  digest::BindKey key{kReservation, {}, kLeg};
  std::copy(kEpoch.begin(), kEpoch.end(), key.epoch);
  std::string bound;
  for (std::uint32_t i = 0; i < 6; ++i) bound += raw(digest::bind(xxh3(chunks[i]), key, 0, i % 2, 0, 10 + i / 2));
  CHECK(rig.report().folds == std::vector<std::uint64_t>{xxh3(bound)});
}

TEST_CASE("a chunk that comes twice makes the leg violated, and its bytes go nowhere") {
  Rig rig;
  rig.open(kReservation, 2, {0});
  Peer first(rig.receiver, 0), second(rig.receiver, 1);
  first.write(0, 0, 0, 2, content(2 * kBytes, 1));
  const std::string record = make_record();
  wire::FrameHeader barrier = first.header(wire::FrameType::kRecord, record.size());
  barrier.leg = 2;
  first.send(raw(barrier) + record);
  REQUIRE(rig.events.wait(Kind::kRecord).has_value());
  const std::string before = rig.pool.everything();
  SUBCASE("on the same lane") {
    first.write(0, 0, 1, 1, content(kBytes, 9));
    rig.barrier(first);
  }
  SUBCASE("on another lane") {
    second.write(0, 0, 1, 1, content(kBytes, 9));
    rig.barrier(second);
  }
  SUBCASE("in part") {
    second.write(0, 0, 1, 2, content(2 * kBytes, 9));
    rig.barrier(second);
  }
  CHECK(starts_with(rig.events.text(Kind::kViolation), "duplicate: "));
  CHECK(rig.report().violations == 1);
  CHECK(rig.pool.everything() == before);
}

TEST_CASE("a frame that does not fit its leg is a violation, goes nowhere, and the lane goes on") {
  Rig rig;
  Peer peer(rig.receiver, 0);
  std::string kind = "bounds: ";
  const std::string page = content(kBytes, 1);
  SUBCASE("group unknown") { peer.write(1, 0, 0, 1, page); }
  SUBCASE("slice beyond the last") { peer.write(0, 2, 0, 1, page); }
  SUBCASE("page index beyond the last") { peer.write(0, 0, 3, 1, page); }
  SUBCASE("run reaches beyond the last page") { peer.write(0, 0, 2, 2, page + page); }
  SUBCASE("page index near 2^64") { peer.write(0, 0, ~0ull, 1, page); }
  SUBCASE("one byte short") {
    kind = "length: ";
    peer.write(0, 0, 0, 1, page.substr(1));
  }
  SUBCASE("one byte long") {
    kind = "length: ";
    peer.write(0, 0, 0, 1, page + "x");
  }
  SUBCASE("a whole chunk too many") {
    kind = "length: ";
    peer.write(0, 0, 0, 1, page + page);
  }
  const auto event = rig.events.wait(Kind::kViolation);
  REQUIRE(event.has_value());
  CHECK(starts_with(event->data, kind));
  CHECK(event->reservation == kReservation);
  CHECK(event->leg == kLeg);
  CHECK(rig.pool.everything() == canaries(rig.pool.everything().size()));
  CHECK(rig.report().violations == 1);
  peer.write(0, 1, 0, 1, page);
  rig.barrier(peer);
  CHECK(rig.pool.page(0, 1, 4) == page);
}

TEST_CASE("broken framing takes the lane down and lands nothing") {
  Rig rig;
  Peer peer(rig.receiver, 0);
  wire::FrameHeader h = peer.write_header(0, 0, 0, 1, kBytes);
  SUBCASE("magic") { h.magic ^= 1; }
  SUBCASE("type 0") { h.type = 0; }
  SUBCASE("a confirmation, which only a sender gets") { h.type = 3; }
  SUBCASE("flags") { h.flags = 1; }
  SUBCASE("an older generation") { h.generation = kGeneration - 1; }
  SUBCASE("another lane") { h.lane = 1; }
  SUBCASE("a gap in the sequence") { h.sequence = 1; }
  SUBCASE("no pages") { h.n_pages = 0; }
  SUBCASE("more pages than a frame may have") { h.n_pages = wire::kMaxPagesPerFrame + 1; }
  SUBCASE("empty body") { h.body_bytes = 0; }
  SUBCASE("oversize body") { h.body_bytes = wire::kFrameBytes + 1; }
  SUBCASE("endless body") { h.body_bytes = ~0ull; }
  SUBCASE("record shorter than any") { h.type = 2, h.body_bytes = 96; }
  SUBCASE("record longer than agreed") { h.type = 2, h.body_bytes = kMaxRecordBytes + 1; }
  peer.send(raw(h) + content(kBytes, 1));
  CHECK(starts_with(rig.events.text(Kind::kViolation), "frame: "));
  CHECK(starts_with(rig.events.text(Kind::kLaneDown), "violation: frame: "));
  CHECK(rig.report().bytes_landed == 0);
  CHECK(rig.pool.everything() == canaries(rig.pool.everything().size()));
}

TEST_CASE("a frame sent twice is out of sequence and takes the lane down") {
  Rig rig;
  Peer peer(rig.receiver, 0);
  const std::string frame = raw(peer.write_header(0, 0, 0, 1, kBytes)) + content(kBytes, 1);
  peer.send(frame + frame);
  CHECK(starts_with(rig.events.text(Kind::kLaneDown), "violation: frame: number 0"));
  CHECK(rig.report().bytes_landed == kBytes);
}

TEST_CASE("a stream cut at any byte ends the lane and leaves no half record") {
  std::string stream;
  std::size_t whole_writes = 0;
  {
    Rig rig;
    Peer peer(rig.receiver, 0);
    stream += raw(peer.write_header(0, 0, 0, 1, kBytes)) + content(kBytes, 1);
    whole_writes = stream.size();
    const std::string record = make_record();
    stream += raw(peer.header(wire::FrameType::kRecord, record.size())) + record;
  }
  for (std::size_t cut = 0; cut < stream.size(); cut += cut < 70 || cut > whole_writes - 3 ? 1 : 37) {
    CAPTURE(cut);
    Rig rig;
    Peer peer(rig.receiver, 0);
    peer.send(stream.substr(0, cut));
    peer.hang_up();
    CHECK(rig.events.text(Kind::kLaneDown) == (cut == 0 || cut == whole_writes ? "eof" : "eof: inside a frame"));
    CHECK(rig.events.none(Kind::kRecord));
    CHECK(rig.report().placed.at(0) == std::string(1, cut >= whole_writes ? '\x01' : '\0'));
    for (const std::uint64_t other : {0, 1, 2, 3, 5}) CHECK(rig.pool.page(0, 0, other) == canaries(kBytes));
  }
}

TEST_CASE("frames for unknown and revoked legs are sunk and counted, and the lane goes on") {
  Rig rig;
  rig.open(kReservation, 2, {0});
  Peer peer(rig.receiver, 0);
  rig.receiver.revoke(kReservation, 2);
  wire::FrameHeader revoked = peer.write_header(0, 0, 0, 1, kBytes);
  revoked.leg = 2;
  peer.send(raw(revoked) + content(kBytes, 1));
  wire::FrameHeader unknown = peer.write_header(0, 0, 0, 1, kBytes);
  unknown.reservation = 99;
  peer.send(raw(unknown) + content(kBytes, 1));
  peer.write(0, 0, 0, 1, content(kBytes, 2));
  rig.barrier(peer);
  CHECK(rig.receiver.sunk_frames() == 2);
  CHECK(rig.events.none(Kind::kViolation));
  CHECK(rig.pool.page(0, 0, 0) == canaries(kBytes));
  CHECK(rig.pool.page(0, 0, 4) == content(kBytes, 2));
}

TEST_CASE("once revoke returns, the rest of a half read frame never reaches the page") {
  for (const bool verify : {true, false}) {
    constexpr std::uint64_t kBig = 1u << 20;
    Pool pool({{{kBig, kBig, 2}}});
    CompletionQueue cq;
    Receiver receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes);
    Events events(cq);
    for (std::uint64_t r : {kReservation, kReservation + 1}) {
      receiver.open_leg(r, kLeg, verify, pack({whole_page(0, 0, kBig)}), {{0, 16, {0}, {r - kReservation}}});
    }
    Peer peer(receiver, 0);
    const std::string body = content(kBig, 1);
    peer.send(raw(peer.write_header(0, 0, 0, 1, kBig)) + body.substr(0, kBig / 2));
    peer.wait_taken();
    receiver.revoke(kReservation, kLeg);
    const std::string before = pool.page(0, 0, 0);
    CHECK(before.substr(0, kBig / 4) == body.substr(0, kBig / 4));
    CHECK(before.substr(kBig / 2) == canaries(kBig / 2));
    peer.send(body.substr(kBig / 2));
    wire::FrameHeader next = peer.write_header(0, 0, 0, 1, kBig);
    next.reservation += 1;
    peer.send(raw(next) + body);
    const std::string record = make_record();
    wire::FrameHeader end = peer.header(wire::FrameType::kRecord, record.size());
    end.reservation += 1;
    peer.send(raw(end) + record);
    REQUIRE(events.wait(Kind::kRecord).has_value());
    CHECK(pool.page(0, 0, 0) == before);
    CHECK(pool.page(0, 0, 1) == body);
    CHECK(receiver.report(kReservation, kLeg).bytes_landed == 0);
  }
}

TEST_CASE("fence returns at once although the peer stopped inside a frame, and nothing lands after it") {
  Rig rig;
  Peer stuck(rig.receiver, 0), idle(rig.receiver, 1);
  stuck.send(raw(stuck.write_header(0, 0, 0, 1, kBytes)) + content(kBytes / 2, 1));
  stuck.wait_taken();
  const auto start = Clock::now();
  rig.receiver.fence();
  CHECK(Clock::now() - start < milliseconds(1000));
  const std::string before = rig.pool.everything();
  CHECK_FALSE(stuck.send(content(kBytes / 2, 1)));
  CHECK(rig.pool.everything() == before);
  CHECK(rig.report().bytes_landed == 0);
  CHECK(rig.events.none(Kind::kLaneDown));
}

TEST_CASE("a fenced generation takes no more lanes, and a refused socket stays the caller's") {
  Rig rig;
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  {
    Peer peer(rig.receiver, 0);
    CHECK_THROWS_AS(rig.receiver.add_lane(0, "tcp", ends[0], nullptr), Error);
    CHECK_THROWS_AS(rig.receiver.add_lane(1, "verbs", ends[0], nullptr), std::invalid_argument);
    CHECK_THROWS_AS(rig.receiver.add_lane(1, "local", ends[0], nullptr), std::invalid_argument);
    rig.receiver.fence();
    CHECK_THROWS_AS(rig.receiver.add_lane(1, "tcp", ends[0], nullptr), Error);
  }
  CHECK(fcntl(ends[0], F_GETFD) >= 0);
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("commit is the last thing a lane says for a leg") {
  Rig rig;
  Peer peer(rig.receiver, 0), other(rig.receiver, 1);
  rig.barrier(peer);
  SUBCASE("a write behind it is refused") {
    peer.write(0, 0, 0, 1, content(kBytes, 1));
    CHECK(starts_with(rig.events.text(Kind::kViolation), "closed: "));
  }
  SUBCASE("a second one is refused") {
    peer.record(make_record());
    CHECK(starts_with(rig.events.text(Kind::kViolation), "record: a second"));
  }
  CHECK(rig.events.none(Kind::kRecord));
  CHECK(rig.report().violations == 1);
  CHECK(rig.pool.everything() == canaries(rig.pool.everything().size()));
  // The other lane has not committed.
  other.write(0, 0, 0, 1, content(kBytes, 1));
  rig.barrier(other);
  CHECK(rig.pool.page(0, 0, 4) == content(kBytes, 1));
}

TEST_CASE("a record whose parts do not add up is refused and never handed on") {
  Rig rig;
  Peer peer(rig.receiver, 0);
  std::string record = make_record(record::Kind::kCommit, 0, 6, 1, "aux");
  record::RecordHeader h;
  std::memcpy(&h, record.data(), sizeof(h));
  SUBCASE("magic") { h.magic = 0; }
  SUBCASE("version") { h.version = 9; }
  SUBCASE("kind") { h.kind = 3; }
  SUBCASE("groups that are not there") { h.n_groups = 1; }
  SUBCASE("2^32 groups") { h.n_groups = ~0u; }
  SUBCASE("chunks that wrap") { h.n_chunks = ~0ull; }
  SUBCASE("folds that wrap") { h.n_folds = 1ull << 61; }
  SUBCASE("aux that wraps") { h.aux_bytes = ~0ull - 6; }
  SUBCASE("aux too short") { h.aux_bytes = 9; }
  SUBCASE("bytes that belong to no part") { h.n_folds = 0; }
  std::memcpy(record.data(), &h, sizeof(h));
  peer.record(record);
  CHECK(starts_with(rig.events.text(Kind::kViolation), "record: "));
  CHECK(rig.events.none(Kind::kRecord));
  CHECK(rig.report().violations == 1);
}

TEST_CASE("a record of an unknown or revoked leg is a violation and is dropped") {
  Rig rig;
  Peer peer(rig.receiver, 0);
  const std::string record = make_record();
  wire::FrameHeader h = peer.header(wire::FrameType::kRecord, record.size());
  SUBCASE("unknown") { h.leg = 77; }
  SUBCASE("revoked") { rig.receiver.revoke(kReservation, kLeg); }
  peer.send(raw(h) + record);
  CHECK(starts_with(rig.events.text(Kind::kViolation), "record: of "));
  CHECK(rig.events.none(Kind::kRecord));
}

TEST_CASE("progress records are taken and not handed on") {
  Rig rig;
  Peer peer(rig.receiver, 0);
  peer.record(make_record(record::Kind::kProgress));
  peer.write(0, 0, 0, 1, content(kBytes, 1));
  peer.record(make_record(record::Kind::kProgress));
  rig.barrier(peer);
  CHECK(rig.events.none(Kind::kRecord));
  CHECK(rig.report().violations == 0);
}

TEST_CASE("violations without end do not fill the queue") {
  Rig rig;
  Peer peer(rig.receiver, 0);
  for (int i = 0; i < 500; ++i) {
    peer.write(9, 0, 0, 1, "x");
    wire::FrameHeader unknown = peer.header(wire::FrameType::kRecord, make_record().size());
    unknown.reservation = static_cast<std::uint64_t>(i);
    peer.send(raw(unknown) + make_record());
  }
  rig.barrier(peer);
  int events = 0;
  while (!rig.events.none(Kind::kViolation)) ++events;
  CHECK(events >= 8);
  CHECK(events < 200);
  CHECK(rig.report().violations == 500);
}

TEST_CASE("a leg that reaches outside the pool is refused when it is opened") {
  Rig rig;
  const auto open = [&](Slice slice, std::vector<std::uint64_t> pages) {
    std::vector<std::uint64_t> logical(pages.size());
    for (std::size_t i = 0; i < pages.size(); ++i) logical[i] = i;
    rig.receiver.open_leg(5, 0, true, pack({slice}), {{slice.group, 16, logical, pages}});
  };
  Slice slice = whole_page(0, 0, kBytes);
  CHECK_THROWS_AS(open(slice, {6}), std::invalid_argument);
  CHECK_THROWS_AS(open(whole_page(0, 2, kBytes), {0}), std::invalid_argument);
  CHECK_THROWS_AS(open(whole_page(1, 0, kBytes), {0}), std::invalid_argument);
  CHECK_THROWS_AS(open(whole_page(0, 0, kBytes + 1), {0}), std::invalid_argument);
  slice.dst_offset = 1;
  CHECK_THROWS_AS(open(slice, {0}), std::invalid_argument);
  slice.dst_offset = ~0ull - 10;
  CHECK_THROWS_AS(open(slice, {0}), std::invalid_argument);
  slice.dst_offset = 0, slice.runs = 0;
  CHECK_THROWS_AS(open(slice, {0}), std::invalid_argument);
  CHECK_THROWS_AS(rig.receiver.open_leg(5, 0, true, "short", {}), std::invalid_argument);
  CHECK_THROWS_AS(rig.open(kReservation, kLeg, {0}), std::invalid_argument);
  CHECK_THROWS_AS(rig.receiver.report(5, 0), Error);
}
