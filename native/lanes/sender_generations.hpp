// The table of source generations that readers on this host map: one 64-bit slot a leg. While a slot holds the value
// that the leg's frames name, the sources are pinned; any other value tells the reader to discard what it copied.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/shared_memory.hpp"
#include "lanes/wire.hpp"

namespace kvxfer {

class GenerationTable {
 public:
  static constexpr std::size_t kSlots = 65536;

  GenerationTable();

  int fd() const noexcept { return memory_.fd(); }
  // A slot of its own for one leg. Throws Error("busy: ...") when every slot is taken.
  wire::SourceRef acquire();
  // Ends the pin: copies that a reader has not yet counted never count. Once this has returned the sources may be
  // overwritten. The slot goes back to the table; its value only ever rises, so an old frame can never match again.
  void release(const wire::SourceRef& ref) noexcept;

 private:
  std::atomic_ref<std::uint64_t> value(std::uint64_t slot) noexcept;

  SharedMemory memory_;
  std::mutex mutex_;
  std::vector<std::uint32_t> free_;
  std::uint32_t next_unused_ = 0;
};

}  // namespace kvxfer
