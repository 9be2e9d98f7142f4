// Lays out commit and progress records as record.hpp says.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "lanes/leg_out.hpp"
#include "lanes/record.hpp"

namespace kvxfer {

struct RecordInput {
  record::Kind kind = record::Kind::kCommit;
  std::array<std::uint8_t, 16> epoch{};
  std::size_t position = 0;           // of the lane in the leg's lane set
  std::vector<std::uint64_t> posted;  // this lane's bitmap, or empty for none
  std::uint64_t n_posted = 0;
  std::vector<std::uint64_t> folds;  // empty: none
  const Commit* commit = nullptr;    // none in a progress record
};

// Appends the record. Reads only what is immutable in the leg.
void append_record(const LegOut& leg, const RecordInput& input, std::vector<std::uint8_t>& out);

}  // namespace kvxfer
