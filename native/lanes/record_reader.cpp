#include "lanes/record_reader.hpp"

#include <cstdint>
#include <cstring>

namespace kvxfer {

bool read_record_framing(std::string_view bytes, record::Kind& kind, std::string& why) {
  record::RecordHeader header;
  if (bytes.size() < kMinRecordBytes) {
    why = "of " + std::to_string(bytes.size()) + " bytes is shorter than any";
    return false;
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != record::kMagic || header.version != record::kVersion) {
    why = "with another magic or version";
    return false;
  }
  kind = static_cast<record::Kind>(header.kind);
  if (kind != record::Kind::kCommit && kind != record::Kind::kProgress) {
    why = "of unknown kind " + std::to_string(header.kind);
    return false;
  }
  // Each part is compared with what is left, so that no sum can wrap.
  std::uint64_t left = bytes.size() - kMinRecordBytes;
  const auto take = [&left](std::uint64_t count, std::uint64_t each) {
    if (count > left / each) return false;
    left -= count * each;
    return true;
  };
  const std::uint64_t bitmap_words = header.n_chunks / 64 + (header.n_chunks % 64 != 0);
  const std::uint64_t aux_words = header.aux_bytes / 8 + (header.aux_bytes % 8 != 0);
  if (!take(header.n_groups, sizeof(record::RecordGroup)) || !take(bitmap_words, 8) || !take(header.n_folds, 8) ||
      !take(aux_words, 8) || left != 0) {
    why = "whose parts do not add up to its " + std::to_string(bytes.size()) + " bytes";
    return false;
  }
  return true;
}

}  // namespace kvxfer
