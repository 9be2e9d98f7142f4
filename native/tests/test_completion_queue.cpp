#include <doctest/doctest.h>
#include <poll.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "core/completion_queue.hpp"

using kvxfer::Completion;
using kvxfer::CompletionQueue;
using kvxfer::Kind;

namespace {

bool readable(const CompletionQueue& queue, int timeout_ms = 0) {
  pollfd waiting{queue.fileno(), POLLIN, 0};
  return poll(&waiting, 1, timeout_ms) == 1;
}

Completion event(std::uint32_t session, std::uint64_t number) {
  return {.kind = Kind::kRecord, .session = session, .reservation = number, .data = "x"};
}

}  // namespace

TEST_CASE("queue is readable exactly while events are pending") {
  CompletionQueue queue;
  CHECK_FALSE(readable(queue));
  queue.push(event(1, 1));
  queue.push(event(1, 2));
  CHECK(readable(queue));
  CHECK(queue.drain().size() == 2);
  CHECK_FALSE(readable(queue));
  CHECK(queue.drain().empty());
  queue.push(event(1, 3));
  CHECK(readable(queue));
}

TEST_CASE("queue hands back every field as it was pushed") {
  CompletionQueue queue;
  queue.push({Kind::kLegFailed, 2, 3, 4, 0xFFFFFFFFFFFFFFFFU, 5, std::string("a\0b", 3)});
  const std::vector<Completion> drained = queue.drain();
  REQUIRE(drained.size() == 1);
  const Completion& c = drained[0];
  CHECK(c.kind == Kind::kLegFailed);
  CHECK(c.session == 2);
  CHECK(c.generation == 3);
  CHECK(c.lane == 4);
  CHECK(c.reservation == 0xFFFFFFFFFFFFFFFFU);
  CHECK(c.leg == 5);
  CHECK(c.data == std::string("a\0b", 3));
}

TEST_CASE("queue keeps each thread's order and loses no event or wake-up") {
  constexpr std::uint32_t kThreads = 4;
  constexpr std::uint64_t kEvents = 2'000;
  CompletionQueue queue;
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&queue, t] {
      for (std::uint64_t i = 0; i < kEvents; ++i) queue.push(event(t, i));
    });
  }
  std::map<std::uint32_t, std::uint64_t> next;
  std::uint64_t received = 0;
  bool in_order = true;
  // A lost wake-up shows as a poll that times out.
  while (received < kThreads * kEvents && readable(queue, 5'000)) {
    for (const Completion& c : queue.drain()) {
      in_order = in_order && c.reservation == next[c.session]++;
      ++received;
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(received == kThreads * kEvents);
  CHECK(in_order);
}
