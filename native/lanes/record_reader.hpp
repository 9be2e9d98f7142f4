// The framing of a record, and nothing more: what it claims is judged by the protocol.
#pragma once

#include <string>
#include <string_view>

#include "lanes/record.hpp"

namespace kvxfer {

// True, and `kind`, where the bytes are one record: magic, version, kind, and parts that add up to its length.
// Otherwise `why`.
bool read_record_framing(std::string_view record, record::Kind& kind, std::string& why);

// Smallest record there is: no groups, chunks, folds or aux.
inline constexpr std::size_t kMinRecordBytes = sizeof(record::RecordHeader) + 8;

}  // namespace kvxfer
