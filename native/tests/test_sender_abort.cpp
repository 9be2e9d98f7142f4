// S2 and S3 at prefill: when sources are let go, what becomes of a frame that was on its way, and lanes that break.
#include "test_sender_kit.hpp"

namespace kvxfer::sender_test {
namespace {

constexpr std::uint64_t kPage = 1 << 20;
constexpr std::uint64_t kPages = 8;
const std::vector<std::uint32_t> kFirstRegion{0};

// A leg in the middle of a frame that its stopped reader does not take.
struct Stuck {
  explicit Stuck(std::uint32_t n_lanes = 1) : source({{1, kPage, kPages}}), prefill(source.map, n_lanes) {
    grant = prefill.sender.grant(1);
    attach(*grant, {}, {whole_page(0, 0, kPage)},
           {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = range(0, kPages)}});
    grant->write(0, range(0, kPages), range(0, kPages), kFirstRegion, false);
    // The socket is full once nothing more goes in.
    for (int before = -1, now = queued(); now != before || now == 0; before = now, now = queued()) {
      std::this_thread::sleep_for(milliseconds(20));
    }
  }
  int queued() {
    int bytes = 0;
    REQUIRE(ioctl(prefill.readers[0].fd(), FIONREAD, &bytes) == 0);
    return bytes;
  }

  Source source;
  Prefill prefill;
  std::unique_ptr<SourceGrant> grant;
};

TEST_CASE("an abort in mid-frame drains at once though the reader is stopped, and the rest of the frame is zeros") {
  Stuck stuck;
  const std::string page = stuck.source.page(0, 0, 0);
  stuck.grant->close_admission(kSession, 100);
  CHECK(stuck.prefill.drained_counts() == std::vector<std::uint64_t>{0});
  // Drained: the engine may do what it likes with its pages.
  stuck.source.memories[0]->forbid();

  const auto frame = stuck.prefill.readers[0].next();
  REQUIRE(frame);
  REQUIRE(frame->body.size() == kPage);
  const std::size_t kept = frame->body.find('\0');
  REQUIRE(kept != std::string::npos);
  CHECK(kept > 0);
  CHECK(frame->body.substr(0, kept) == page.substr(0, kept));
  CHECK(frame->body.find_first_not_of('\0', kept) == std::string::npos);
  CHECK(stuck.prefill.readers[0].silent());
}

TEST_CASE("after an abort the lane still serves other legs") {
  Stuck stuck;
  const Source& source = stuck.source;
  const auto other = stuck.prefill.sender.grant(2);
  attach(*other, {.reservation = 101}, {whole_page(0, 0, kPage)},
         {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0}}});
  other->write(0, range(0, 1), range(5, 1), kFirstRegion, false);
  other->commit(16, "");
  stuck.grant->close_admission(kSession, 100);
  const auto frames = stuck.prefill.readers[0].until_record(101);
  REQUIRE(frames.size() == 2);
  CHECK(frames[0].body == source.page(0, 0, 5));
}

TEST_CASE("closing a grant returns though the reader is stopped, and no source is read after it") {
  Stuck stuck;
  const auto before = Clock::now();
  stuck.grant->close();
  CHECK(Clock::now() - before < milliseconds(1000));
  stuck.source.memories[0]->forbid();
  const auto frame = stuck.prefill.readers[0].next();
  REQUIRE(frame);
  CHECK(frame->body.back() == '\0');
  CHECK_FALSE(stuck.prefill.event(Kind::kLaneDown, milliseconds(0)));
}

TEST_CASE("detaching an open leg lets its sources go and reports nothing") {
  Stuck stuck;
  stuck.grant->detach(kSession, 100);
  stuck.source.memories[0]->forbid();
  CHECK(stuck.prefill.readers[0].next());
  CHECK_FALSE(stuck.prefill.event(Kind::kLegDrained, milliseconds(50)));
  CHECK_FALSE(stuck.prefill.event(Kind::kLegFailed, milliseconds(0)));
}

TEST_CASE("closing a session whose reader is stopped returns at once and fails its legs") {
  Stuck stuck;
  const auto before = Clock::now();
  stuck.prefill.sender.close_session(kSession, kGeneration);
  CHECK(Clock::now() - before < milliseconds(1000));
  stuck.source.memories[0]->forbid();
  const auto failed = stuck.prefill.event(Kind::kLegFailed, milliseconds(0));
  REQUIRE(failed);
  CHECK(failed->data.starts_with("lane: "));
  CHECK(failed->reservation == 100);
  // Written in mid-frame, cut off: the reader sees the end of the stream, never a whole frame.
  CHECK_FALSE(stuck.prefill.readers[0].next());
}

TEST_CASE("a second abort, or one after the drain, reports nothing more") {
  Stuck stuck;
  stuck.grant->close_admission(kSession, 100);
  stuck.grant->close_admission(kSession, 100);
  stuck.prefill.drained_counts();
  stuck.grant->close_admission(kSession, 100);
  CHECK_FALSE(stuck.prefill.event(Kind::kLegDrained, milliseconds(50)));
  stuck.grant->close_admission(kSession, 999);
}

TEST_CASE("nothing written after an abort is sent to the aborted reader, and other readers still get it") {
  const Source source({{1, kPage, kPages}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  for (const std::uint64_t reservation : {100, 101}) {
    attach(*grant, {.reservation = reservation}, {whole_page(0, 0, kPage)},
           {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = {0}}});
  }
  grant->close_admission(kSession, 100);
  prefill.drained_counts();
  grant->write(0, range(0, 1), range(3, 1), kFirstRegion, false);
  grant->commit(16, "");
  const auto first = prefill.readers[0].next();
  REQUIRE(first);
  CHECK(first->header.reservation == 101);
  const auto second = prefill.readers[0].next();
  REQUIRE(second);
  CHECK(second->header.reservation == 101);
  CHECK(prefill.readers[0].silent());
}

TEST_CASE("a reader that hangs up takes the lane down, and with it the legs that use it") {
  const Source source({{1, kPage, kPages}});
  Prefill prefill(source.map, 2);
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {.reservation = 100, .lanes = {0, 1}}, {}, {});
  attach(*grant, {.reservation = 101, .lanes = {0}}, {}, {});
  prefill.readers[1].hang_up();
  const auto down = prefill.event(Kind::kLaneDown);
  REQUIRE(down);
  CHECK(down->lane == 1);
  CHECK(down->generation == kGeneration);
  CHECK(down->session == kSession);
  const auto failed = prefill.event(Kind::kLegFailed);
  REQUIRE(failed);
  CHECK(failed->reservation == 100);
  CHECK(failed->data.starts_with("lane: lane 1: "));
  grant->commit(0, "");
  CHECK(parse_record(prefill.readers[0].until_record(101).back().body).header.n_lanes == 1);
}

TEST_CASE("a leg in mid-frame on a broken lane fails, and its sources are free when it says so") {
  Stuck stuck(2);
  stuck.prefill.readers[0].hang_up();
  const auto failed = stuck.prefill.event(Kind::kLegFailed);
  REQUIRE(failed);
  stuck.source.memories[0]->forbid();
  CHECK_FALSE(stuck.prefill.event(Kind::kLegDrained, milliseconds(20)));
}

TEST_CASE("a leg on a lane that is down already fails by event") {
  const Source source({{1, kPage, kPages}});
  Prefill prefill(source.map);
  prefill.readers[0].hang_up();
  REQUIRE(prefill.event(Kind::kLaneDown));
  const auto grant = prefill.sender.grant(1);
  attach(*grant, {}, {}, {});
  const auto failed = prefill.event(Kind::kLegFailed);
  REQUIRE(failed);
  CHECK(failed->data == "lane: lane 0 is down");
}

TEST_CASE("data from the reader of a tcp lane takes the lane down") {
  const Source source({{1, kPage, kPages}});
  Prefill prefill(source.map);
  REQUIRE(send(prefill.readers[0].fd(), "x", 1, MSG_NOSIGNAL) == 1);
  const auto down = prefill.event(Kind::kLaneDown);
  REQUIRE(down);
  CHECK(down->data.starts_with("protocol: "));
}

TEST_CASE("idle lanes use no processor time") {
  const Source source({{1, kPage, kPages}});
  Prefill prefill(source.map, 4);
  const auto used = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
  };
  std::this_thread::sleep_for(milliseconds(20));
  const auto before = used();
  std::this_thread::sleep_for(milliseconds(200));
  CHECK(used() - before < 20'000'000);
}

TEST_CASE("a lane blocked on a stopped reader uses no processor time") {
  Stuck stuck;
  const auto used = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
  };
  const auto before = used();
  std::this_thread::sleep_for(milliseconds(200));
  CHECK(used() - before < 20'000'000);
}

}  // namespace
}  // namespace kvxfer::sender_test
