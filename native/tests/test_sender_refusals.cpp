// What write, attach, commit and the lanes refuse, and that a refusal changes nothing.
#include "test_sender_kit.hpp"

namespace kvxfer::sender_test {
namespace {

constexpr std::uint64_t kPage = 4096;
const std::vector<std::uint32_t> kFirstRegion{0};

std::string refusal(const auto& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

struct Fixture {
  Fixture() : source({{2, kPage, 8}}), prefill(source.map), grant(prefill.sender.grant(1)) {
    attach(*grant, {}, {whole_page(0, 0, kPage), whole_page(0, 1, kPage)},
           {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = range(0, 8)}});
  }
  std::uint64_t write(std::vector<std::uint64_t> logical, std::vector<std::uint64_t> pages,
                      std::vector<std::uint32_t> regions = kFirstRegion) {
    return grant->write(0, logical, pages, regions, false);
  }
  Source source;
  Prefill prefill;
  std::unique_ptr<SourceGrant> grant;
};

TEST_CASE_FIXTURE(Fixture, "a page written twice is refused, and nothing of that call is queued") {
  write({1}, {1});
  REQUIRE(prefill.readers[0].next());
  CHECK(refusal([&] { write({0, 1, 2}, {0, 1, 2}); }).starts_with("duplicate: "));
  CHECK(refusal([&] { write({3, 3}, {3, 3}); }).starts_with("duplicate: "));
  CHECK(refusal([&] { write({3}, {3}, {1, 1}); }).starts_with("duplicate: "));
  CHECK(prefill.readers[0].silent());
  CHECK(grant->written() == 1);
}

TEST_CASE_FIXTURE(Fixture, "another region of the same page is no duplicate") {
  write({1}, {1}, {0});
  write({1}, {1}, {1});
  CHECK(grant->written() == 2);
}

TEST_CASE_FIXTURE(Fixture,
                  "pages, regions and groups outside the pool are refused, and nothing of that call is queued") {
  CHECK(refusal([&] { write({0, 1}, {0, 8}); }).starts_with("bounds: "));
  CHECK(refusal([&] { write({0}, {0}, {2}); }).starts_with("bounds: "));
  CHECK(refusal([&] { grant->write(1, range(0, 1), range(0, 1), kFirstRegion, false); }).starts_with("bounds: "));
  CHECK(refusal([&] { write({0, 1}, {0}); }).starts_with("bounds: "));
  CHECK(refusal([&] { write({std::uint64_t{1} << 32}, {0}); }).starts_with("bounds: "));
  CHECK(prefill.readers[0].silent());
  CHECK(grant->written() == 0);
}

TEST_CASE_FIXTURE(Fixture, "a logical page lies in one source page for all its regions") {
  write({1}, {1}, {0});
  CHECK(refusal([&] { write({1}, {2}, {1}); }).starts_with("bounds: "));
}

TEST_CASE_FIXTURE(Fixture, "a write or commit after the commit is refused, and nothing follows the record") {
  grant->commit(0, "");
  CHECK(refusal([&] { write({0}, {0}); }).starts_with("closed: "));
  CHECK(refusal([&] { grant->commit(0, ""); }).starts_with("closed: "));
  CHECK(prefill.readers[0].until_record(100).size() == 1);
  CHECK(prefill.readers[0].silent());
}

TEST_CASE_FIXTURE(Fixture, "a closed grant takes nothing more") {
  grant->close();
  grant->close();
  CHECK(refusal([&] { write({0}, {0}); }).starts_with("closed: "));
  CHECK(refusal([&] { grant->commit(0, ""); }).starts_with("closed: "));
  CHECK(refusal([&] { attach(*grant, {.reservation = 101}, {}, {}); }).starts_with("closed: "));
}

TEST_CASE_FIXTURE(Fixture, "slices outside prefill's pool, and lanes the session does not have, are refused") {
  const std::vector<SourceGrant::AttachGroup> groups{
      {.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0}}};
  const auto attempt = [&](Slice slice, std::vector<std::uint32_t> lanes = {0}) {
    return refusal([&] { attach(*grant, {.reservation = 101, .lanes = std::move(lanes)}, {slice}, groups); });
  };
  Slice slice = whole_page(0, 0, kPage);
  CHECK(attempt(slice, {}).starts_with("bounds: "));
  CHECK(attempt(slice, {1}).starts_with("bounds: "));
  CHECK(attempt(slice, {0, 0}).starts_with("bounds: "));
  slice.src_region = 2;
  CHECK(attempt(slice).starts_with("bounds: "));
  slice = whole_page(0, 0, kPage);
  slice.src_group = 1;
  CHECK(attempt(slice).starts_with("bounds: "));
  slice = whole_page(0, 0, kPage);
  slice.src_offset = 1;
  CHECK(attempt(slice).starts_with("bounds: "));
  // None of these left anything behind.
  attach(*grant, {.reservation = 101}, {whole_page(0, 0, kPage)}, groups);
  CHECK(attempt(whole_page(0, 0, kPage)).starts_with("duplicate: "));
}

TEST_CASE_FIXTURE(Fixture, "a lane of another generation, of an unknown session, or connected before is refused") {
  int fds[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  CHECK_THROWS_AS(prefill.sender.add_lane(kSession, kGeneration + 1, 0, LaneKind::kTcp, fds[0]), Error);
  CHECK_THROWS_AS(prefill.sender.add_lane(kSession + 1, kGeneration, 0, LaneKind::kTcp, fds[0]), Error);
  CHECK_THROWS_AS(prefill.sender.add_lane(kSession, kGeneration, 0, LaneKind::kTcp, fds[0]), Error);
  CHECK_THROWS_AS(prefill.sender.add_lane(kSession, kGeneration, 1, LaneKind::kTcp, fds[0]), Error);
  // Still the caller's.
  CHECK(fcntl(fds[0], F_GETFD) >= 0);
  close(fds[0]);
  close(fds[1]);
}

TEST_CASE_FIXTURE(Fixture, "a generation is opened once and never again, and a newer one ends the older") {
  CHECK_THROWS_AS(prefill.sender.open_session(kSession, kEpoch, kGeneration, 1), Error);
  CHECK_THROWS_AS(prefill.sender.open_session(kSession, kEpoch, kGeneration - 1, 1), Error);
  prefill.sender.open_session(kSession, kEpoch, kGeneration + 1, 1);
  CHECK(prefill.event(Kind::kLegFailed, milliseconds(0)));
  CHECK_THROWS_AS(attach(*grant, {.reservation = 101}, {}, {}), Error);
}

TEST_CASE_FIXTURE(Fixture, "closing a session spares a newer generation, and an unknown session is fine") {
  prefill.sender.close_session(kSession, kGeneration - 1);
  prefill.sender.close_session(kSession + 1, kGeneration);
  grant->commit(0, "");
  CHECK(prefill.readers[0].until_record(100).size() == 1);
}

TEST_CASE_FIXTURE(Fixture, "a sender that was closed has failed its legs and opens no session") {
  prefill.sender.close();
  CHECK(prefill.event(Kind::kLegFailed, milliseconds(0)));
  CHECK_THROWS_AS(prefill.sender.open_session(kSession + 1, kEpoch, 0, 1), Error);
}

}  // namespace
}  // namespace kvxfer::sender_test
