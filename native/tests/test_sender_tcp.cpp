// What goes over a tcp lane: frames, records, and which lane carries what.
#include "test_sender_kit.hpp"

namespace kvxfer::sender_test {
namespace {

constexpr std::uint64_t kPage = 4096;
const std::vector<std::uint32_t> kFirstRegion{0};

TEST_CASE("every written page arrives whole, under its page index, and the record behind it names all of them") {
  const Source source({{2, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {.carries_aux = true}, {whole_page(0, 0, kPage), whole_page(0, 1, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0, 1, 2}}});
  const std::vector<std::uint64_t> logical{0, 1, 2}, pages{5, 2, 7};
  const std::vector<std::uint32_t> regions{0, 1};
  CHECK(grant->write(0, logical, pages, regions, false) == 6 * kPage);
  grant->commit(48, "aux bytes");

  const auto frames = prefill.readers[0].until_record(100);
  Chunks chunks;
  collect(frames, chunks);
  REQUIRE(chunks.size() == 6);
  for (std::uint32_t region = 0; region < 2; ++region) {
    for (std::uint64_t k = 0; k < 3; ++k) CHECK(chunks[{0, region, k}] == source.page(0, region, pages[k]));
  }
  for (const Frame& frame : frames) {
    CHECK(frame.header.generation == kGeneration);
    CHECK(frame.header.lane == 0);
    CHECK(frame.header.leg == 0);
    CHECK(frame.header.flags == 0);
  }
  const ParsedRecord record = parse_record(frames.back().body);
  CHECK(record.posted == std::set<std::uint64_t>{0, 1, 2, 3, 4, 5});
  CHECK(record.header.flags == (record::kFlagFolds | record::kFlagAux));
  CHECK(record.header.n_tokens == 48);
  CHECK(record.header.reservation == 100);
  CHECK(std::equal(kEpoch.begin(), kEpoch.end(), record.header.epoch));
  CHECK(record.aux == "aux bytes");
  CHECK(prefill.drained_counts() == std::vector<std::uint64_t>{6});
  CHECK(grant->written() == 6);
  CHECK(grant->highest_logical(0) == 2);
}

TEST_CASE("lanes share a leg, each record names what its own lane carried, and the first lane's folds speak of all") {
  const Source source({{1, 64 * 1024, 64}});
  Prefill prefill(source.map, 3, LaneKind::kTcp, 64 * 1024);
  const auto grant = prefill.sender.grant(1);
  const auto logical = range(0, 64);
  attach(*grant, {.carries_aux = true, .lanes = {0, 1, 2}}, {whole_page(0, 0, 64 * 1024)},
         {{.group = 0, .tokens_per_page = 64, .first_token = 0, .logical = logical}});
  grant->write(0, logical, logical, kFirstRegion, false);
  grant->commit(4096, "a");

  std::vector<std::vector<Frame>> frames(3);
  std::vector<std::thread> threads;
  for (std::size_t lane = 0; lane < 3; ++lane) {
    threads.emplace_back([&, lane] { frames[lane] = prefill.readers[lane].until_record(100); });
  }
  for (std::thread& thread : threads) thread.join();

  Chunks chunks;
  std::vector<std::uint64_t> counts;
  for (std::size_t lane = 0; lane < 3; ++lane) {
    std::set<std::uint64_t> came;
    for (const Frame& frame : frames[lane]) {
      for (std::uint64_t i = 0; i < frame.header.n_pages; ++i) came.insert(frame.header.page_first + i);
    }
    collect(frames[lane], chunks);
    const ParsedRecord record = parse_record(frames[lane].back().body);
    CHECK(record.posted == came);
    CHECK(record.header.lane == lane);
    CHECK(record.header.n_lanes == 3);
    CHECK(record.folds.size() == (lane == 0 ? 64 : 0));
    CHECK(record.aux == (lane == 0 ? "a" : ""));
    counts.push_back(came.size());
  }
  CHECK(chunks.size() == 64);
  CHECK(prefill.drained_counts() == counts);

  digest::BindKey key{.reservation = 100, .epoch = {}, .leg = 0};
  std::copy(kEpoch.begin(), kEpoch.end(), key.epoch);
  const ParsedRecord first = parse_record(frames[0].back().body);
  for (std::uint64_t k = 0; k < 64; ++k) {
    const std::string& chunk = chunks[{0, 0, k}];
    const std::uint64_t bound = digest::bind(digest::xxh3_64(chunk.data(), chunk.size()), key, 0, 0, 0, k);
    CHECK(first.folds[k] == digest::xxh3_64(&bound, sizeof(bound)));
  }
}

TEST_CASE("a frame carries consecutive pages only, and no more than its bound") {
  const Source source({{1, kPage, 16}});
  Prefill prefill(source.map, 1, LaneKind::kTcp, 4 * kPage);
  const auto grant = prefill.sender.grant(1);
  const std::vector<std::uint64_t> reserved{0, 1, 2, 3, 4, 5, 9};
  attach(*grant, {}, {whole_page(0, 0, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = reserved}});
  const std::vector<std::uint64_t> written{0, 1, 2, 3, 4, 9};
  grant->write(0, written, written, kFirstRegion, false);
  grant->commit(0, "");
  std::vector<std::pair<std::uint64_t, std::uint32_t>> runs;
  for (const Frame& frame : prefill.readers[0].until_record(100)) {
    if (frame.header.n_pages > 0) runs.emplace_back(frame.header.page_first, frame.header.n_pages);
  }
  CHECK(runs == std::vector<std::pair<std::uint64_t, std::uint32_t>>{{0, 4}, {4, 1}, {6, 1}});
}

TEST_CASE("a chunk larger than a frame travels alone") {
  const Source source({{1, 3 << 20, 2}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {}, {whole_page(0, 0, 3 << 20)},
         {{.group = 0, .tokens_per_page = 64, .first_token = 0, .logical = {0, 1}}});
  grant->write(0, range(0, 2), range(0, 2), kFirstRegion, false);
  grant->commit(128, "");
  const auto frames = prefill.readers[0].until_record(100);
  REQUIRE(frames.size() == 3);
  CHECK(frames[0].body == source.page(0, 0, 0));
  CHECK(frames[1].body == source.page(0, 0, 1));
}

TEST_CASE("one-byte pages go thousands to a frame") {
  const Source source({{1, 1, 10000}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  const auto logical = range(0, 10000);
  attach(*grant, {}, {whole_page(0, 0, 1)}, {{.group = 0, .tokens_per_page = 1, .first_token = 0, .logical = logical}});
  grant->write(0, logical, logical, kFirstRegion, false);
  grant->commit(10000, "");
  const auto frames = prefill.readers[0].until_record(100);
  CHECK(frames.size() == 4);
  Chunks chunks;
  collect(frames, chunks);
  REQUIRE(chunks.size() == 10000);
  bool equal = true;
  for (std::uint64_t k = 0; k < 10000; ++k) equal = equal && chunks[{0, 0, k}] == source.page(0, 0, k);
  CHECK(equal);
}

TEST_CASE("what was written before a reader came is sent when it comes, and later writes follow") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  grant->write(0, range(0, 2), range(4, 2), kFirstRegion, false);
  attach(*grant, {}, {whole_page(0, 0, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0, 1, 2}}});
  grant->write(0, range(2, 1), range(0, 1), kFirstRegion, false);
  grant->commit(48, "");
  Chunks chunks;
  collect(prefill.readers[0].until_record(100), chunks);
  CHECK(chunks[{0, 0, 0}] == source.page(0, 0, 4));
  CHECK(chunks[{0, 0, 1}] == source.page(0, 0, 5));
  CHECK(chunks[{0, 0, 2}] == source.page(0, 0, 0));
}

TEST_CASE("a reader that comes after the commit gets pages and record all the same") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  grant->write(0, range(0, 3), range(0, 3), kFirstRegion, false);
  grant->commit(48, "x");
  attach(*grant, {.carries_aux = true}, {whole_page(0, 0, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0, 1, 2}}});
  const auto frames = prefill.readers[0].until_record(100);
  CHECK(parse_record(frames.back().body).posted.size() == 3);
  CHECK(parse_record(frames.back().body).aux == "x");
  CHECK(prefill.drained_counts() == std::vector<std::uint64_t>{3});
}

TEST_CASE("pages that a reader did not reserve are neither sent nor forgotten: they are counted") {
  const Source source({{2, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  const std::vector<std::uint32_t> regions{0, 1};
  grant->write(0, range(0, 2), range(0, 2), regions, false);
  attach(*grant, {}, {whole_page(0, 0, kPage), whole_page(0, 1, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 16, .logical = {1, 3}}});
  grant->write(0, range(2, 2), range(2, 2), regions, false);
  grant->commit(64, "");
  Chunks chunks;
  collect(prefill.readers[0].until_record(100), chunks);
  CHECK(chunks.size() == 4);
  CHECK(chunks.contains({0, 1, 0}));
  CHECK(chunks.contains({0, 1, 1}));
  CHECK(grant->skipped(100) == 4);
  CHECK(grant->written() == 8);
}

TEST_CASE("the record's token ranges begin where the reader's do and end at the commit's token") {
  const Source source({{1, kPage, 8}, {1, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {}, {whole_page(0, 0, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 32, .logical = {2}},
          {.group = 1, .tokens_per_page = 16, .first_token = 80, .logical = {}}});
  grant->commit(50, "");
  const ParsedRecord record = parse_record(prefill.readers[0].until_record(100).back().body);
  REQUIRE(record.groups.size() == 2);
  CHECK(record.groups[0].first_token == 32);
  CHECK(record.groups[0].n_tokens == 18);
  CHECK(record.groups[1].group == 1);
  CHECK(record.groups[1].n_tokens == 0);
}

TEST_CASE("a leg with nothing to write still has a record on each of its lanes") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map, 2);
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {.leg = 1, .lanes = {1, 0}}, {},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0}}});
  grant->commit(16, "unused");
  for (std::uint32_t lane = 0; lane < 2; ++lane) {
    const auto frames = prefill.readers[lane].until_record(100);
    REQUIRE(frames.size() == 1);
    const ParsedRecord record = parse_record(frames[0].body);
    CHECK(record.header.lane == lane);
    CHECK(record.header.leg == 1);
    CHECK(record.header.n_chunks == 0);
    CHECK(record.aux.empty());
  }
  CHECK(prefill.drained_counts() == std::vector<std::uint64_t>{0, 0});
}

TEST_CASE("without verify there are neither folds nor digests") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1, false);
  attach(*grant, {.verify = false}, {whole_page(0, 0, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0}}});
  grant->write(0, range(0, 1), range(3, 1), kFirstRegion, false);
  grant->commit(16, "");
  const auto frames = prefill.readers[0].until_record(100);
  CHECK(frames[0].body == source.page(0, 0, 3));
  CHECK(parse_record(frames[1].body).header.flags == 0);
  CHECK(grant->digests(kSession, 100, 0, 1) == std::vector<std::uint64_t>{0});
  CHECK_THROWS_AS(attach(*grant, {.reservation = 101}, {}, {}), std::invalid_argument);
}

TEST_CASE("content digests are told for what was posted only") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {}, {whole_page(0, 0, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0, 1}}});
  grant->write(0, range(1, 1), range(6, 1), kFirstRegion, false);
  grant->commit(32, "");
  prefill.readers[0].until_record(100);
  prefill.drained_counts();
  const std::string page = source.page(0, 0, 6);
  CHECK(grant->digests(kSession, 100, 0, 2) ==
        std::vector<std::uint64_t>{0, digest::xxh3_64(page.data(), page.size())});
  CHECK_THROWS_AS(grant->digests(kSession, 100, 1, 2), std::invalid_argument);
}

TEST_CASE("a batch may end with a progress record that names what its lane has carried so far") {
  const Source source({{2, kPage, 8}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {}, {whole_page(0, 0, kPage), whole_page(0, 1, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0, 1}}});
  grant->write(0, range(0, 2), range(0, 2), kFirstRegion, true);
  const auto data = prefill.readers[0].next();
  const auto progress = prefill.readers[0].next();
  REQUIRE(progress);
  const ParsedRecord record = parse_record(progress->body);
  CHECK(record.header.kind == static_cast<std::uint16_t>(record::Kind::kProgress));
  CHECK(record.posted == std::set<std::uint64_t>{0, 2});
  CHECK(record.folds.empty());
}

TEST_CASE("lanes that connect after the leg was attached take their share") {
  const Source source({{1, kPage, 8}});
  Prefill prefill(source.map, 0);
  prefill.sender.open_session(kSession, kEpoch, kGeneration + 1, 1);
  const auto grant = prefill.sender.grant(1);
  LegOutSpec spec = spec_of({});
  spec.generation = kGeneration + 1;
  grant->attach(spec, {whole_page(0, 0, kPage)},
                {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0}}});
  grant->write(0, range(0, 1), range(0, 1), kFirstRegion, false);
  grant->commit(16, "");
  prefill.connect(0, LaneKind::kTcp, kGeneration + 1);
  CHECK(prefill.event(Kind::kLaneUp));
  CHECK(prefill.readers[0].until_record(100).size() == 2);
}

TEST_CASE("a short handoff does not wait behind a long one") {
  const Source source({{1, kPage, 64}});
  Prefill prefill(source.map, 0, LaneKind::kTcp, kPage);
  prefill.sender.open_session(kSession, kEpoch, kGeneration + 1, 1);
  const auto slow = prefill.sender.grant(1), quick = prefill.sender.grant(2);
  for (const auto& [grant, reservation, pages] :
       {std::tuple(slow.get(), 100u, 64u), std::tuple(quick.get(), 101u, 1u)}) {
    LegOutSpec spec = spec_of({.reservation = reservation});
    spec.generation = kGeneration + 1;
    grant->attach(spec, {whole_page(0, 0, kPage)},
                  {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = range(0, pages)}});
    grant->write(0, range(0, pages), range(0, pages), kFirstRegion, false);
    grant->commit(16 * pages, "");
  }
  prefill.connect(0, LaneKind::kTcp, kGeneration + 1);
  std::size_t before = 0;
  for (;;) {
    const auto frame = prefill.readers[0].next();
    REQUIRE(frame);
    if (frame->header.reservation == 101 && frame->header.n_pages == 0) break;
    ++before;
  }
  CHECK(before < 8);
}

}  // namespace
}  // namespace kvxfer::sender_test
