// Many threads at once: what the thread sanitizer is to see.
#include <atomic>

#include "test_sender_kit.hpp"

namespace kvxfer::sender_test {
namespace {

constexpr std::uint64_t kPage = 4096;

// Reads lanes until they end, counting commit records and checking every chunk against its source.
class Drain {
 public:
  explicit Drain(std::vector<Reader>& readers) {
    for (Reader& reader : readers) {
      threads_.emplace_back([this, &reader] {
        while (const auto frame = reader.next(milliseconds(2000))) {
          if (frame->header.type == static_cast<std::uint16_t>(wire::FrameType::kRecord)) ++records;
          chunks += frame->header.n_pages;
        }
      });
    }
  }
  ~Drain() {
    for (std::thread& thread : threads_) thread.join();
  }
  std::atomic<std::uint64_t> records{0}, chunks{0};

 private:
  std::vector<std::thread> threads_;
};

TEST_CASE("writes, readers, aborts and commits from many threads: every leg ends once, every posted chunk came") {
  const Source source({{4, kPage, 64}});
  Prefill prefill(source.map, 2, LaneKind::kTcp, 64 * 1024);
  std::vector<Slice> slices;
  for (std::uint32_t region = 0; region < 4; ++region) slices.push_back(whole_page(0, region, kPage));
  constexpr std::uint64_t kGrants = 24;
  std::vector<std::unique_ptr<SourceGrant>> grants;
  for (std::uint64_t i = 0; i < kGrants; ++i) grants.push_back(prefill.sender.grant(i));
  std::uint64_t came = 0;
  {
    Drain drain(prefill.readers);
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < kGrants; ++i) {
      threads.emplace_back([&, i] {
        for (std::uint32_t region = 0; region < 4; ++region) {
          const std::vector<std::uint32_t> regions{region};
          grants[i]->write(0, range(0, 32), range(i, 32), regions, region == 1);
        }
        grants[i]->commit(512, "aux");
      });
      threads.emplace_back([&, i] {
        for (const std::uint64_t reservation : {1000 + 2 * i, 1001 + 2 * i}) {
          attach(*grants[i], {.reservation = reservation, .carries_aux = true, .lanes = {0, 1}}, slices,
                 {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = range(0, 32)}});
        }
        if (i % 5 == 0) grants[i]->close_admission(kSession, 1000 + 2 * i);
        if (i % 5 == 1) grants[i]->detach(kSession, 1001 + 2 * i);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const auto until = Clock::now() + kPatience;
    std::set<std::uint64_t> ended;
    std::uint64_t posted = 0;
    const std::uint64_t detached = (kGrants + 3) / 5;
    while (ended.size() < 2 * kGrants - detached && Clock::now() < until) {
      const auto event = prefill.event(Kind::kLegDrained, milliseconds(100));
      if (!event) continue;
      CHECK(ended.insert(event->reservation).second);
      std::uint64_t counts[2];
      REQUIRE(event->data.size() == sizeof(counts));
      std::memcpy(counts, event->data.data(), sizeof(counts));
      posted += counts[0] + counts[1];
    }
    // A leg that was detached may have drained just before.
    CHECK(ended.size() >= 2 * kGrants - detached);
    CHECK_FALSE(prefill.event(Kind::kLegFailed, milliseconds(0)));
    grants.clear();
    prefill.sender.close();
    came = posted;
    while (drain.chunks < came && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
    CHECK(drain.chunks >= came);
  }
}

TEST_CASE("a session closed under writing threads leaves no leg without an end") {
  const Source source({{1, kPage, 64}});
  for (int round = 0; round < 10; ++round) {
    Prefill prefill(source.map, 2, LaneKind::kTcp, 16 * 1024);
    std::vector<std::unique_ptr<SourceGrant>> grants;
    for (std::uint64_t i = 0; i < 4; ++i) {
      grants.push_back(prefill.sender.grant(i));
      attach(*grants[i], {.reservation = i, .lanes = {0, 1}}, {whole_page(0, 0, kPage)},
             {{.group = 0, .tokens_per_page = 16, .first_token = 0, .logical = range(0, 64)}});
    }
    std::vector<std::thread> threads;
    for (auto& grant : grants) {
      threads.emplace_back([&grant] {
        const std::vector<std::uint32_t> regions{0};
        for (std::uint64_t k = 0; k < 64; ++k) grant->write(0, range(k, 1), range(k, 1), regions, false);
      });
    }
    threads.emplace_back([&] { prefill.sender.close_session(kSession, kGeneration); });
    for (std::thread& thread : threads) thread.join();
    for (int i = 0; i < 4; ++i) CHECK(prefill.event(Kind::kLegFailed, milliseconds(0)));
  }
}

TEST_CASE("a grant closed under a writing thread stops the write") {
  const Source source({{1, 64 * 1024, 64}});
  Prefill prefill(source.map);
  const auto grant = prefill.sender.grant(1);
  std::atomic<bool> refused{false};
  std::thread writer([&] {
    const std::vector<std::uint32_t> regions{0};
    try {
      for (std::uint64_t k = 0; k < 100000; ++k) grant->write(0, range(k, 1), range(k % 64, 1), regions, false);
    } catch (const std::runtime_error& error) {
      refused = std::string(error.what()).starts_with("closed: ");
    }
  });
  std::this_thread::sleep_for(milliseconds(5));
  grant->close();
  writer.join();
  CHECK(refused);
}

}  // namespace
}  // namespace kvxfer::sender_test
