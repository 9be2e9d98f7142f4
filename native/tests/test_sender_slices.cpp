// Readers that take parts of prefill's pages: a tensor-parallel decode behind an unsharded prefill.
#include "test_sender_kit.hpp"

namespace kvxfer::sender_test {
namespace {

constexpr std::uint32_t kRows = 8;
constexpr std::uint64_t kHalf = 512;
constexpr std::uint64_t kPage = kRows * 2 * kHalf;
const std::vector<std::uint32_t> kFirstRegion{0};

digest::BindKey key_of(std::uint64_t reservation, std::uint32_t leg) {
  digest::BindKey key{.reservation = reservation, .epoch = {}, .leg = leg};
  std::copy(kEpoch.begin(), kEpoch.end(), key.epoch);
  return key;
}

void check_half(Reader& reader, const Source& source, std::uint64_t reservation, std::uint32_t which,
                const std::vector<std::uint64_t>& pages) {
  const Slice slice = half_rows(0, kRows, kHalf, which);
  const auto frames = reader.until_record(reservation);
  Chunks chunks;
  collect(frames, chunks);
  const ParsedRecord record = parse_record(frames.back().body);
  REQUIRE(chunks.size() == pages.size());
  REQUIRE(record.folds.size() == pages.size());
  for (std::uint64_t k = 0; k < pages.size(); ++k) {
    const std::string expected = cut(source.page(0, 0, pages[k]), slice);
    CHECK(chunks[{0, 0, k}] == expected);
    const std::uint64_t bound =
        digest::bind(digest::xxh3_64(expected.data(), expected.size()), key_of(reservation, 0), 0, 0, which, k);
    CHECK(record.folds[k] == digest::xxh3_64(&bound, sizeof(bound)));
  }
}

void run_two_readers(bool early) {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map, 2);
  const auto grant = prefill.sender.grant(1);
  const std::vector<std::uint64_t> pages{6, 1, 3};
  if (early) grant->write(0, range(0, 3), pages, kFirstRegion, false);
  for (std::uint32_t which = 0; which < 2; ++which) {
    attach(*grant, {.reservation = 100 + which, .lanes = {which}}, {half_rows(0, kRows, kHalf, which)},
           {{.group = 0, .tokens_per_page = 64, .first_token = 0, .logical = range(0, 3)}});
  }
  if (!early) grant->write(0, range(0, 3), pages, kFirstRegion, false);
  grant->commit(192, "");
  for (std::uint32_t which = 0; which < 2; ++which) {
    check_half(prefill.readers[which], source, 100 + which, which, pages);
  }
}

TEST_CASE("two readers of half pages each get their half, with digests of the half") { run_two_readers(false); }

TEST_CASE("two readers of half pages that come after the write get the same") { run_two_readers(true); }

TEST_CASE("a page that changed between the write and the coming of a reader of its parts fails the leg, unsent") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  grant->write(0, range(0, 1), range(4, 1), kFirstRegion, false);
  source.map.groups[0][0].page(4)[kPage - 1] ^= 1;
  // The half that is asked for is untouched; the page as it was written is gone all the same.
  attach(*grant, {}, {half_rows(0, kRows, kHalf, 0)},
         {{.group = 0, .tokens_per_page = 64, .first_token = 0, .logical = {0}}});
  const auto failed = prefill.event(Kind::kLegFailed);
  REQUIRE(failed);
  CHECK(failed->data.starts_with("source_changed: "));
  CHECK(prefill.readers[0].silent());
  // The lane is as good as before, and the reader of a lane without gaps sees none.
  const auto other = prefill.sender.grant(2);
  attach(*other, {.reservation = 101}, {}, {});
  other->commit(0, "");
  CHECK(prefill.readers[0].until_record(101).size() == 1);
}

// A lane that checks a huge page, which takes it a while, when its leg is ended in one way or another.
void end_while_reading(const auto& end) {
  constexpr std::uint64_t kHuge = 64 << 20;
  const Source source({{1, kHuge, 1}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  grant->write(0, range(0, 1), range(0, 1), kFirstRegion, false);
  attach(*grant, {}, {half_rows(0, 1, kHuge / 2, 0)},
         {{.group = 0, .tokens_per_page = 64, .first_token = 0, .logical = {0}}});
  std::this_thread::sleep_for(milliseconds(5));
  end(prefill, *grant);
  // Whoever still reads it faults.
  source.memories[0]->forbid();
  std::this_thread::sleep_for(milliseconds(50));
}

TEST_CASE("an abort while a lane reads a page is reported when it has stopped reading, and not before") {
  end_while_reading([](Prefill& prefill, SourceGrant& grant) {
    grant.close_admission(kSession, 100);
    prefill.drained_counts();
  });
}

TEST_CASE("detaching a leg, closing its grant or its session waits for a lane that reads a page") {
  end_while_reading([](Prefill&, SourceGrant& grant) { grant.detach(kSession, 100); });
  end_while_reading([](Prefill&, SourceGrant& grant) { grant.close(); });
  end_while_reading([](Prefill& prefill, SourceGrant&) { prefill.sender.close_session(kSession, kGeneration); });
}

TEST_CASE("a page that changed after the write is sent under the digest it had, for the reader to refuse") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  grant->write(0, range(0, 1), range(4, 1), kFirstRegion, false);
  const std::string before = source.page(0, 0, 4);
  source.map.groups[0][0].page(4)[0] ^= 2;
  attach(*grant, {}, {whole_page(0, 0, kPage)},
         {{.group = 0, .tokens_per_page = 64, .first_token = 0, .logical = {0}}});
  grant->commit(64, "");
  const auto frames = prefill.readers[0].until_record(100);
  CHECK(frames[0].body != before);
  const std::uint64_t bound = digest::bind(digest::xxh3_64(before.data(), before.size()), key_of(100, 0), 0, 0, 0, 0);
  CHECK(parse_record(frames[1].body).folds[0] == digest::xxh3_64(&bound, sizeof(bound)));
}

TEST_CASE("several slices of one page are several chunks, and a skipped page counts once") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  grant->write(0, range(0, 2), range(0, 2), kFirstRegion, false);
  attach(*grant, {}, {half_rows(0, kRows, kHalf, 0), half_rows(0, kRows, kHalf, 1)},
         {{.group = 0, .tokens_per_page = 64, .first_token = 64, .logical = {1}}});
  grant->commit(128, "");
  Chunks chunks;
  collect(prefill.readers[0].until_record(100), chunks);
  REQUIRE(chunks.size() == 2);
  CHECK(chunks[{0, 0, 0}] == cut(source.page(0, 0, 1), half_rows(0, kRows, kHalf, 0)));
  CHECK(chunks[{0, 1, 0}] == cut(source.page(0, 0, 1), half_rows(0, kRows, kHalf, 1)));
  CHECK(grant->skipped(100) == 1);
}

TEST_CASE("long runs go out by reference and short runs gathered, with the same bytes") {
  for (const std::uint64_t run_bytes : {1, 3, 2047, 2048, 5000}) {
    const Source source({{1, 4 * run_bytes, 300}});
    Prefill prefill(source.map);
    const auto grant = prefill.sender.grant(1);
    const Slice slice{0, 0, 1, 0, 0, 2, run_bytes, run_bytes, 2 * run_bytes, 0, run_bytes};
    attach(*grant, {}, {slice}, {{.group = 0, .tokens_per_page = 64, .first_token = 0, .logical = range(0, 300)}});
    grant->write(0, range(0, 300), range(0, 300), kFirstRegion, false);
    grant->commit(0, "");
    Chunks chunks;
    collect(prefill.readers[0].until_record(100), chunks);
    REQUIRE(chunks.size() == 300);
    bool equal = true;
    for (std::uint64_t k = 0; k < 300; ++k) equal = equal && chunks[{0, 0, k}] == cut(source.page(0, 0, k), slice);
    CHECK(equal);
  }
}

TEST_CASE("on a local lane a part that was written early is vouched for by its own digest") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map, 1, LaneKind::kLocal);
  const auto grant = prefill.sender.grant(1);
  grant->write(0, range(0, 1), range(5, 1), kFirstRegion, false);
  const Slice slice = half_rows(0, kRows, kHalf, 1);
  attach(*grant, {}, {slice}, {{.group = 0, .tokens_per_page = 64, .first_token = 0, .logical = {0}}});
  grant->commit(64, "");
  REQUIRE(prefill.readers[0].next());
  const auto record = prefill.readers[0].next();
  REQUIRE(record);
  const std::string half = cut(source.page(0, 0, 5), slice);
  const std::uint64_t bound = digest::bind(digest::xxh3_64(half.data(), half.size()), key_of(100, 0), 0, 0, 1, 0);
  CHECK(parse_record(record->body.substr(sizeof(wire::SourceRef))).folds[0] == digest::xxh3_64(&bound, sizeof(bound)));
}

}  // namespace
}  // namespace kvxfer::sender_test
