// S2 at decode: a fence, or a revoke, that has returned means that nobody is placing bytes any more.
#include <sched.h>

#include <atomic>

#include "test_receiver_kit.hpp"

using namespace kvxfer;
using namespace kvxfer::test;

namespace {

constexpr std::uint64_t kPage = 4096;

// Ends the means to write while a reader is in the middle of a page, and says whether that returned too early.
bool returned_while_placing(const std::function<void(Receiver&)>& end) {
  Pool pool({{{kPage, kPage, 2}}});
  CompletionQueue cq;
  Receiver receiver(cq, pool.map, kSession, kEpoch, kGeneration, kMaxRecordBytes);
  receiver.open_leg(kReservation, kLeg, true, pack({whole_page(0, 0, kPage)}), {{0, 16, {0, 1}, {0, 1}}});
  std::atomic<bool> placing{false}, ending{false}, ended{false}, ended_inside{false}, left{false};
  std::thread ender([&] {
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    while (!placing && Clock::now() < deadline) std::this_thread::yield();
    ending = true;
    end(receiver);
    ended = true;
  });
  {
    const Tripwire trip(pool.map.groups[0][0].page(0), kPage, [&] {
      placing = true;
      const auto deadline = Clock::now() + std::chrono::seconds(10);
      while (!ending && Clock::now() < deadline) sched_yield();
      const auto until = Clock::now() + milliseconds(100);
      while (Clock::now() < until && !ended) sched_yield();
      ended_inside = ended.load();
      left = true;
    });
    Peer peer(receiver, 0);
    peer.write(0, 0, 0, 2, content(2 * kPage, 1));
    ender.join();
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    while (!left && Clock::now() < deadline) sched_yield();
  }
  CHECK(left.load());
  return ended_inside;
}

}  // namespace

TEST_CASE("a fence returns only when whoever is placing bytes has ended") {
  CHECK_FALSE(returned_while_placing([](Receiver& receiver) { receiver.fence(); }));
}

TEST_CASE("a revoke returns only when whoever is placing bytes of the leg has let go") {
  CHECK_FALSE(returned_while_placing([](Receiver& receiver) { receiver.revoke(kReservation, kLeg); }));
}
