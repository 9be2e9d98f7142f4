#include <doctest/doctest.h>

#include <stdexcept>
#include <vector>

#include "digest/xxh3.hpp"
#include "lanes/leg_table.hpp"

namespace {

using kvxfer::LegGroup;
using kvxfer::LegTable;
using kvxfer::Slice;

Slice slice(std::uint32_t group, std::uint32_t region, std::uint32_t unit = 0) {
  return {group, region, unit, group, region, 1, 8, 0, 8, 0, 8};
}

LegGroup group(std::uint32_t index, std::uint32_t tokens_per_page, std::vector<std::uint64_t> logical) {
  return {.group = index, .tokens_per_page = tokens_per_page, .logical = std::move(logical)};
}

TEST_CASE("chunks are numbered page by page, slice by slice, group by group") {
  const LegTable table({slice(1, 0), slice(1, 1), slice(4, 0)}, {group(4, 0, {7}), group(1, 16, {0, 2, 5})});
  const LegGroup& first = *table.find(1);
  const LegGroup& second = *table.find(4);
  CHECK(table.n_chunks() == 7);
  CHECK(first.ordinal(0, 0) == 0);
  CHECK(first.ordinal(0, 1) == 1);
  CHECK(first.ordinal(2, 1) == 5);
  CHECK(second.ordinal(0, 0) == 6);
}

TEST_CASE("a group without slices has neither chunks nor folds") {
  const LegTable table({slice(2, 0)}, {group(0, 16, {0, 1}), group(2, 16, {0})});
  CHECK(table.find(0)->n_slices == 0);
  CHECK(table.find(0)->n_folds == 0);
  CHECK(table.n_chunks() == 1);
  CHECK(table.n_folds() == 1);
}

TEST_CASE("pages of fewer than 64 tokens share a fold, others have one each") {
  CHECK(LegTable({slice(0, 0)}, {group(0, 16, {0, 1, 2, 3, 4})}).n_folds() == 2);
  CHECK(LegTable({slice(0, 0)}, {group(0, 24, {0, 1, 2, 3, 4})}).n_folds() == 3);
  CHECK(LegTable({slice(0, 0)}, {group(0, 64, {0, 1, 2})}).n_folds() == 3);
  CHECK(LegTable({slice(0, 0)}, {group(0, 128, {0, 1, 2})}).n_folds() == 3);
  CHECK(LegTable({slice(0, 0)}, {group(0, 0, {0, 1, 2})}).n_folds() == 3);
}

TEST_CASE("a fold is the digest of its chunks' bound digests in ordinal order") {
  const LegTable table({slice(0, 3, 2), slice(0, 5, 0)}, {group(0, 32, {4, 9, 11})});
  const kvxfer::digest::BindKey key{.reservation = 77, .epoch = {1, 2, 3}, .leg = 2};
  const std::vector<std::uint64_t> content{10, 11, 12, 13, 14, 15};
  const std::vector<std::uint64_t> all{0b111111};
  const std::vector<std::uint64_t> bound{
      kvxfer::digest::bind(10, key, 0, 3, 2, 4), kvxfer::digest::bind(11, key, 0, 5, 0, 4),
      kvxfer::digest::bind(12, key, 0, 3, 2, 9), kvxfer::digest::bind(13, key, 0, 5, 0, 9)};
  const auto folds = table.folds(key, content, all);
  REQUIRE(folds.size() == 2);
  CHECK(folds[0] == kvxfer::digest::xxh3_64(bound.data(), 32));
  CHECK(folds[1] != 0);
}

TEST_CASE("a fold with an absent chunk is 0 and leaves the others alone") {
  const LegTable table({slice(0, 0)}, {group(0, 64, {0, 1, 2})});
  const kvxfer::digest::BindKey key{.reservation = 1, .epoch = {}, .leg = 0};
  const std::vector<std::uint64_t> content{1, 2, 3};
  const auto folds = table.folds(key, content, std::vector<std::uint64_t>{0b101});
  CHECK(folds[0] != 0);
  CHECK(folds[1] == 0);
  CHECK(folds[2] != 0);
}

TEST_CASE("slices out of order, twice, or of a group that is not reserved are refused") {
  const std::vector<LegGroup> groups{group(0, 16, {0}), group(1, 16, {0})};
  CHECK_THROWS_AS(LegTable({slice(1, 0), slice(0, 0)}, groups), std::invalid_argument);
  CHECK_THROWS_AS(LegTable({slice(0, 0), slice(0, 0)}, groups), std::invalid_argument);
  CHECK_THROWS_AS(LegTable({slice(2, 0)}, groups), std::invalid_argument);
  CHECK_THROWS_AS(kvxfer::parse_slices(std::string(65, '\0')), std::invalid_argument);
}

TEST_CASE("logical pages out of order or twice, and groups twice, are refused") {
  CHECK_THROWS_AS(LegTable({}, {group(0, 16, {1, 0})}), std::invalid_argument);
  CHECK_THROWS_AS(LegTable({}, {group(0, 16, {1, 1})}), std::invalid_argument);
  CHECK_THROWS_AS(LegTable({}, {group(0, 16, {1}), group(0, 16, {2})}), std::invalid_argument);
}

TEST_CASE("a pattern fits only if its last run ends inside the page and its runs do not overlap") {
  CHECK(kvxfer::pattern_fits(1, 64, 0, 0, 64));
  CHECK_FALSE(kvxfer::pattern_fits(1, 64, 1, 0, 64));
  CHECK(kvxfer::pattern_fits(4, 8, 8, 16, 64));
  CHECK_FALSE(kvxfer::pattern_fits(4, 8, 9, 16, 64));
  CHECK_FALSE(kvxfer::pattern_fits(2, 8, 0, 7, 64));
  CHECK_FALSE(kvxfer::pattern_fits(0, 8, 0, 8, 64));
  CHECK_FALSE(kvxfer::pattern_fits(1, 0, 0, 8, 64));
  CHECK_FALSE(kvxfer::pattern_fits(3, 8, 0, ~std::uint64_t{0} / 2 + 1, 64));
  CHECK_FALSE(kvxfer::pattern_fits(2, 8, ~std::uint64_t{0} - 4, 8, 64));
}

}  // namespace
