// A local lane: frames name pages, the reader copies, and a slot of the generation table says while it may.
#include "test_sender_kit.hpp"

namespace kvxfer::sender_test {
namespace {

constexpr std::uint64_t kPage = 4096;
const std::vector<std::uint32_t> kFirstRegion{0};

wire::SourceRef ref_of(const Frame& frame) {
  wire::SourceRef ref{};
  REQUIRE(frame.body.size() >= sizeof(ref));
  std::memcpy(&ref, frame.body.data(), sizeof(ref));
  return ref;
}

struct Fixture {
  Fixture() : source({{1, kPage, 64}}), prefill(source.map, 2, LaneKind::kLocal), grant(prefill.sender.grant(1)) {
    void* at =
        mmap(nullptr, GenerationTable::kSlots * 8, PROT_READ, MAP_SHARED, prefill.sender.generation_table_fd(), 0);
    REQUIRE(at != MAP_FAILED);
    slots = static_cast<const std::uint64_t*>(at);
  }
  ~Fixture() { munmap(const_cast<std::uint64_t*>(slots), GenerationTable::kSlots * 8); }
  void attach_pages(std::uint64_t n_pages, std::vector<std::uint32_t> lanes, std::uint64_t reservation = 100) {
    attach(*grant, {.reservation = reservation, .lanes = std::move(lanes)}, {whole_page(0, 0, kPage)},
           {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = range(0, n_pages)}});
  }
  std::uint64_t slot(std::uint64_t index) const { return __atomic_load_n(&slots[index], __ATOMIC_ACQUIRE); }

  Source source;
  Prefill prefill;
  std::unique_ptr<SourceGrant> grant;
  const std::uint64_t* slots = nullptr;
};

TEST_CASE_FIXTURE(Fixture, "a frame names prefill's pages and the slot that holds while they are pinned") {
  attach_pages(3, {0});
  const std::vector<std::uint64_t> pages{9, 4, 6};
  grant->write(0, range(0, 3), pages, kFirstRegion, true);
  const auto frame = prefill.readers[0].next();
  REQUIRE(frame);
  CHECK(frame->header.n_pages == 3);
  REQUIRE(frame->body.size() == sizeof(wire::SourceRef) + 24);
  CHECK(std::memcmp(frame->body.data() + sizeof(wire::SourceRef), pages.data(), 24) == 0);
  const wire::SourceRef ref = ref_of(*frame);
  CHECK(slot(ref.slot) == ref.expected);
  // No progress record: a reader that digests as it copies has no use for one.
  CHECK(prefill.readers[0].silent());
}

TEST_CASE_FIXTURE(Fixture, "a committed leg drains when every lane's record is confirmed, and not before") {
  attach_pages(2, {0, 1});
  grant->write(0, range(0, 2), range(0, 2), kFirstRegion, false);
  grant->commit(32, "");
  std::vector<wire::SourceRef> refs;
  for (std::uint32_t lane = 0; lane < 2; ++lane) {
    for (;;) {
      const auto frame = prefill.readers[lane].next();
      REQUIRE(frame);
      if (frame->header.type != static_cast<std::uint16_t>(wire::FrameType::kRecord)) continue;
      refs.push_back(ref_of(*frame));
      CHECK(parse_record(frame->body.substr(sizeof(wire::SourceRef))).header.lane == lane);
      break;
    }
  }
  prefill.readers[1].confirm(1, 100, 0, 0);
  CHECK_FALSE(prefill.event(Kind::kLegDrained, milliseconds(50)));
  CHECK(slot(refs[0].slot) == refs[0].expected);
  prefill.readers[0].confirm(0, 100, 0, 0);
  const auto counts = prefill.drained_counts();
  CHECK(counts[0] + counts[1] == 2);
  CHECK(slot(refs[0].slot) > refs[0].expected);
}

TEST_CASE_FIXTURE(Fixture, "an abort changes the slot and drains at once, whatever the reader does") {
  attach_pages(2, {0});
  grant->write(0, range(0, 2), range(0, 2), kFirstRegion, false);
  const wire::SourceRef ref = ref_of(*prefill.readers[0].next());
  grant->close_admission(kSession, 100);
  CHECK(slot(ref.slot) > ref.expected);
  prefill.drained_counts();
}

TEST_CASE_FIXTURE(Fixture, "a committed leg whose reader stops can still be aborted") {
  attach_pages(2, {0});
  grant->write(0, range(0, 2), range(0, 2), kFirstRegion, false);
  grant->commit(32, "");
  CHECK_FALSE(prefill.event(Kind::kLegDrained, milliseconds(50)));
  grant->close_admission(kSession, 100);
  CHECK(prefill.drained_counts() == std::vector<std::uint64_t>{2});
}

TEST_CASE_FIXTURE(Fixture, "a lane that breaks before the confirmation fails the leg and changes the slot") {
  attach_pages(2, {0});
  grant->write(0, range(0, 2), range(0, 2), kFirstRegion, false);
  const wire::SourceRef ref = ref_of(*prefill.readers[0].next());
  grant->commit(32, "");
  prefill.readers[0].hang_up();
  const auto failed = prefill.event(Kind::kLegFailed);
  REQUIRE(failed);
  CHECK(slot(ref.slot) > ref.expected);
}

TEST_CASE_FIXTURE(Fixture, "closing the grant changes the slot before it returns") {
  attach_pages(2, {0});
  grant->write(0, range(0, 2), range(0, 2), kFirstRegion, false);
  const wire::SourceRef ref = ref_of(*prefill.readers[0].next());
  grant->close();
  CHECK(slot(ref.slot) > ref.expected);
}

TEST_CASE_FIXTURE(Fixture, "two live legs never share a slot, and a slot comes back with a higher value only") {
  attach_pages(1, {0}, 100);
  attach_pages(1, {0}, 101);
  grant->write(0, range(0, 1), range(0, 1), kFirstRegion, false);
  const auto one = prefill.readers[0].next(), two = prefill.readers[0].next();
  REQUIRE(one);
  REQUIRE(two);
  CHECK(ref_of(*one).slot != ref_of(*two).slot);
  grant->close_admission(kSession, two->header.reservation);
  attach_pages(1, {0}, 102);
  const auto three = prefill.readers[0].next();
  REQUIRE(three);
  CHECK(ref_of(*three).slot == ref_of(*two).slot);
  CHECK(ref_of(*three).expected > ref_of(*two).expected);
}

TEST_CASE("a full generation table refuses, and a slot given back serves again") {
  GenerationTable table;
  std::vector<wire::SourceRef> refs;
  for (std::size_t i = 0; i < GenerationTable::kSlots; ++i) refs.push_back(table.acquire());
  CHECK_THROWS_WITH_AS(table.acquire(), doctest::Contains("busy: "), Error);
  table.release(refs[77]);
  const wire::SourceRef again = table.acquire();
  CHECK(again.slot == 77);
  CHECK(again.expected == refs[77].expected + 1);
}

TEST_CASE_FIXTURE(Fixture, "a confirmation of a record that was not sent takes the lane down") {
  attach_pages(1, {0});
  prefill.readers[0].confirm(0, 100, 0, 0);
  const auto down = prefill.event(Kind::kLaneDown);
  REQUIRE(down);
  CHECK(down->data.starts_with("protocol: "));
  CHECK(prefill.event(Kind::kLegFailed));
}

TEST_CASE_FIXTURE(Fixture, "a confirmation out of sequence or for another lane takes the lane down") {
  prefill.readers[0].confirm(0, 100, 0, 5);
  prefill.readers[1].confirm(0, 100, 0, 0);
  CHECK(prefill.event(Kind::kLaneDown));
  CHECK(prefill.event(Kind::kLaneDown));
}

TEST_CASE_FIXTURE(Fixture, "a confirmation for a leg that is gone is ignored") {
  attach_pages(1, {0});
  grant->commit(16, "");
  REQUIRE(prefill.readers[0].next());
  grant->detach(kSession, 100);
  prefill.readers[0].confirm(0, 100, 0, 0);
  CHECK_FALSE(prefill.event(Kind::kLaneDown, milliseconds(50)));
}

TEST_CASE("a stopped copier leaves the rest of a handoff to the others") {
  constexpr std::uint64_t kPages = 1 << 16, kPagesPerFrame = 64;
  const Source source({{1, 1, kPages}});
  Prefill prefill(source.map, 2, LaneKind::kLocal, kPagesPerFrame);
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {.lanes = {0, 1}}, {whole_page(0, 0, 1)},
         {{.group = 0, .tokens_per_page = 1, .first_token = 0, .logical = range(0, kPages)}});
  grant->write(0, range(0, kPages), range(0, kPages), kFirstRegion, false);
  // Lane 0 is never read: it keeps the few frames that its socket holds.
  std::uint64_t came = 0;
  while (const auto frame = prefill.readers[1].next(milliseconds(200))) came += frame->header.n_pages;
  CHECK(came >= kPages - 32 * kPagesPerFrame);
  CHECK(came < kPages);
}

}  // namespace
}  // namespace kvxfer::sender_test
