// What one grant has written: which source page holds which logical page, and the digest each (region, page) had at
// write(). 8 bytes a chunk and one bit. Not thread-safe: the grant's mutex guards it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/pool_map.hpp"

namespace kvxfer {

class SourceTable {
 public:
  static constexpr std::uint64_t kMaxLogical = std::uint64_t{1} << 32;

  // One source page of a group, under its logical number. Rows are numbered in order of their first write.
  using Row = std::uint32_t;

  // `pool` must outlive the table. Without `digests` only the pages are kept.
  SourceTable(const PoolMap& pool, bool digests);

  // Throws std::invalid_argument("bounds: ...", "duplicate: ..."): what write() refuses. Changes nothing.
  void check(std::uint32_t group, std::span<const std::uint64_t> logical, std::span<const std::uint64_t> pages,
             std::span<const std::uint32_t> regions) const;
  // Rows of the pages, made where they are new.
  std::vector<Row> rows(std::uint32_t group, std::span<const std::uint64_t> logical,
                        std::span<const std::uint64_t> pages);
  // The page of this region is written, with this digest.
  void add(std::uint32_t group, std::uint32_t region, Row row, std::uint64_t digest);

  std::optional<Row> find(std::uint32_t group, std::uint64_t logical) const noexcept;
  bool written(std::uint32_t group, std::uint32_t region, Row row) const noexcept;
  std::uint64_t digest(std::uint32_t group, std::uint32_t region, Row row) const noexcept;
  std::uint64_t page(std::uint32_t group, Row row) const noexcept { return groups_[group].pages[row]; }

  std::uint64_t chunks() const noexcept { return chunks_; }
  std::uint64_t chunks(std::uint32_t group, std::uint32_t region) const noexcept;
  // Highest logical page of the group with a chunk written, or -1.
  std::int64_t highest_logical(std::uint32_t group) const noexcept;
  void clear() noexcept;

 private:
  static constexpr std::size_t kBlock = 1024;
  static constexpr Row kNoRow = ~Row{0};

  struct Region {
    std::vector<std::uint64_t> written;  // bitmap by row
    std::vector<std::uint64_t> digests;  // by row
    std::uint64_t chunks = 0;
  };
  struct Group {
    std::vector<std::unique_ptr<std::array<Row, kBlock>>> by_logical;
    std::vector<std::uint64_t> pages;    // by row
    std::vector<std::uint64_t> logical;  // by row
    std::vector<Region> regions;
    std::int64_t highest = -1;
  };

  const PoolMap& pool_;
  const bool digests_;
  std::vector<Group> groups_;
  std::uint64_t chunks_ = 0;
};

}  // namespace kvxfer
