#include "lanes/sender_generations.hpp"

#include <string>

#include "core/error.hpp"

namespace kvxfer {

GenerationTable::GenerationTable() : memory_(kSlots * sizeof(std::uint64_t), "kvxfer-generations") {}

std::atomic_ref<std::uint64_t> GenerationTable::value(std::uint64_t slot) noexcept {
  return std::atomic_ref(reinterpret_cast<std::uint64_t*>(memory_.data())[slot]);
}

wire::SourceRef GenerationTable::acquire() {
  const std::lock_guard lock(mutex_);
  std::uint32_t slot = 0;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else if (next_unused_ < kSlots) {
    // Room for giving it back is made now: release() must not fail.
    free_.reserve(next_unused_ + std::size_t{1});
    slot = next_unused_++;
  } else {
    throw Error("busy: all " + std::to_string(kSlots) + " source generations are in use; detach legs that have ended");
  }
  return {slot, value(slot).load(std::memory_order_relaxed)};
}

void GenerationTable::release(const wire::SourceRef& ref) noexcept {
  value(ref.slot).fetch_add(1, std::memory_order_seq_cst);
  // A release store orders what came before it; here what comes after, the reuse of the sources, must stay behind it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const std::lock_guard lock(mutex_);
  free_.push_back(static_cast<std::uint32_t>(ref.slot));
}

}  // namespace kvxfer
