#include "lanes/record_builder.hpp"

#include <algorithm>
#include <cstring>

#include "digest/xxh3.hpp"

namespace kvxfer {
namespace {

void append(std::vector<std::uint8_t>& out, const void* data, std::size_t n) {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  out.insert(out.end(), bytes, bytes + n);
}

}  // namespace

void append_record(const LegOut& leg, const RecordInput& input, std::vector<std::uint8_t>& out) {
  const std::size_t start = out.size();
  const bool carries_aux = input.commit != nullptr && leg.spec.carries_aux && input.position == 0;
  record::RecordHeader header{};
  header.magic = record::kMagic;
  header.version = record::kVersion;
  header.kind = static_cast<std::uint16_t>(input.kind);
  header.reservation = leg.spec.reservation;
  std::memcpy(header.epoch, input.epoch.data(), input.epoch.size());
  header.generation = leg.spec.generation;
  header.leg = leg.spec.leg;
  header.lane = leg.spec.lanes[input.position];
  header.n_lanes = static_cast<std::uint32_t>(leg.spec.lanes.size());
  header.n_groups = static_cast<std::uint32_t>(leg.table.groups().size());
  // The flags say what the record is meant to carry, also where that is empty.
  if (input.commit != nullptr && leg.spec.verify && input.position == 0) header.flags |= record::kFlagFolds;
  if (carries_aux) header.flags |= record::kFlagAux;
  header.n_chunks = leg.table.n_chunks();
  header.n_posted = input.n_posted;
  header.n_folds = input.folds.size();
  header.n_tokens = input.commit != nullptr ? input.commit->n_tokens : 0;
  header.aux_bytes = carries_aux ? input.commit->aux.size() : 0;
  append(out, &header, sizeof(header));

  for (std::size_t g = 0; g < leg.table.groups().size(); ++g) {
    const std::uint64_t first = leg.first_tokens[g];
    const record::RecordGroup group{.group = leg.table.groups()[g].group,
                                    .reserved = 0,
                                    .first_token = first,
                                    .n_tokens = header.n_tokens > first ? header.n_tokens - first : 0};
    append(out, &group, sizeof(group));
  }
  if (input.posted.empty()) {
    out.resize(out.size() + leg.table.bitmap_words() * sizeof(std::uint64_t));
  } else {
    append(out, input.posted.data(), input.posted.size() * sizeof(std::uint64_t));
  }
  append(out, input.folds.data(), input.folds.size() * sizeof(std::uint64_t));
  if (carries_aux) {
    append(out, input.commit->aux.data(), input.commit->aux.size());
    out.resize(out.size() + (8 - header.aux_bytes % 8) % 8);
  }
  const std::uint64_t digest = digest::xxh3_64(out.data() + start, out.size() - start);
  append(out, &digest, sizeof(digest));
}

}  // namespace kvxfer
