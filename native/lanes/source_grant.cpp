#include "lanes/source_grant.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "core/error.hpp"
#include "digest/xxh3.hpp"
#include "lanes/sender.hpp"

namespace kvxfer {
namespace {

// What is digested before it is queued: early enough to keep the lanes busy, late enough for the locks not to show.
constexpr std::uint64_t kPieceBytes = 1 << 20;
constexpr std::size_t kPieceChunks = 4096;
// Below this a caller sends by itself: a hand-over to a thread would take longer.
constexpr std::uint64_t kSmallBytes = 256 << 10;
constexpr std::uint64_t kSmallRecordChunks = 16384;
constexpr std::int64_t kNotReserved = -1;

[[noreturn]] void refuse_closed(const std::string& what) { throw std::runtime_error("closed: " + what); }

std::uint64_t partial_digest(const SliceSource& source, std::uint64_t page) {
  digest::Hasher hasher;
  const std::uint8_t* chunk = source.chunk(page);
  for (std::uint64_t run = 0; run < source.runs; ++run) hasher.update(chunk + run * source.stride, source.run_bytes);
  return hasher.digest();
}

// Gathers page indices that follow each other into batches of one frame each.
class RunBuilder {
 public:
  RunBuilder(std::vector<Batch>& out, std::uint32_t group, std::uint32_t slice, std::uint32_t max_pages, bool recheck)
      : out_(out), open_{.group = group, .slice = slice, .recheck = recheck}, max_pages_(max_pages) {}

  void add(std::uint64_t page_index) {
    if (open_.n_pages > 0 &&
        (open_.page_first + std::uint64_t{open_.n_pages} != page_index || open_.n_pages == max_pages_)) {
      flush();
    }
    if (open_.n_pages == 0) open_.page_first = static_cast<std::uint32_t>(page_index);
    ++open_.n_pages;
  }
  void flush() {
    if (open_.n_pages > 0) out_.push_back(open_);
    open_.n_pages = 0;
  }

 private:
  std::vector<Batch>& out_;
  Batch open_;
  std::uint32_t max_pages_;
};

}  // namespace

// Chunks that have been digested and are about to be queued.
struct SourceGrant::Piece {
  struct Span {
    std::uint32_t region;
    std::size_t first, count;  // of the call's pages
  };
  std::vector<Span> spans;
  std::vector<std::uint64_t> digests;  // span after span
  std::uint64_t bytes = 0;
};

// The call's pages as one leg numbers them.
struct SourceGrant::Match {
  std::vector<std::vector<std::int64_t>> index;  // by group position: page index or kNotReserved; empty: another source
};

// One write(), its pages sorted by logical page.
struct SourceGrant::Call {
  std::uint32_t group = 0;
  std::vector<std::uint64_t> logical, pages;
  std::vector<SourceTable::Row> rows;
  bool small = false;
  std::map<const LegOut*, Match> matches;
};

SourceGrant::SourceGrant(Sender& sender, std::uint64_t id, bool digests)
    : sender_(sender), id_(id), digests_(digests), table_(sender.pool(), digests) {}

SourceGrant::~SourceGrant() { close(); }

std::uint64_t SourceGrant::write(std::uint32_t group, std::span<const std::uint64_t> logical,
                                 std::span<const std::uint64_t> pages, std::span<const std::uint32_t> regions,
                                 bool progress) {
  const std::lock_guard writing(write_mutex_);
  Call call;
  call.group = group;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || commit_) refuse_closed("grant " + std::to_string(id_) + " takes no more writes");
    table_.check(group, logical, pages, regions);
    std::vector<std::size_t> order(logical.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return logical[a] < logical[b]; });
    for (const std::size_t i : order) {
      call.logical.push_back(logical[i]);
      call.pages.push_back(pages[i]);
    }
    call.rows = table_.rows(group, call.logical, call.pages);
  }
  const auto& maps = sender_.pool().groups[group];
  std::uint64_t total = 0;
  for (const std::uint32_t region : regions) total += maps[region].page_bytes * call.pages.size();
  call.small = total <= kSmallBytes;

  Piece piece;
  for (const std::uint32_t region : regions) {
    const RegionMap& map = maps[region];
    for (std::size_t i = 0; i < call.pages.size(); ++i) {
      if (closing_.load(std::memory_order_relaxed))
        refuse_closed("grant " + std::to_string(id_) + " was closed meanwhile");
      if (piece.spans.empty() || piece.spans.back().region != region) piece.spans.push_back({region, i, 0});
      ++piece.spans.back().count;
      piece.digests.push_back(digests_ ? digest::xxh3_64(map.page(call.pages[i]), map.page_bytes) : 0);
      piece.bytes += map.page_bytes;
      if (piece.bytes >= kPieceBytes || piece.digests.size() >= kPieceChunks) {
        publish(call, piece);
        piece = {};
      }
    }
  }
  if (!piece.spans.empty()) publish(call, piece);
  if (progress) {
    const Batch batch{.progress = true};
    const std::lock_guard lock(mutex_);
    for (const auto& [key, entry] : legs_) entry.session->publish(entry.leg, {&batch, 1});
  }
  if (call.small || progress) post_all(call.small);
  return total;
}

SourceGrant::Match SourceGrant::match(const LegOut& leg, const Call& call) {
  Match match;
  for (std::size_t g = 0; g < leg.table.groups().size(); ++g) {
    auto& index = match.index.emplace_back();
    if (leg.source_group(g) != call.group) continue;
    const auto& reserved = leg.table.groups()[g].logical;
    index.reserve(call.logical.size());
    auto at = reserved.begin();
    for (const std::uint64_t logical : call.logical) {
      at = std::lower_bound(at, reserved.end(), logical);
      index.push_back(at != reserved.end() && *at == logical ? at - reserved.begin() : kNotReserved);
    }
  }
  return match;
}

void SourceGrant::publish(Call& call, const Piece& piece) {
  const std::lock_guard lock(mutex_);
  if (closed_) refuse_closed("grant " + std::to_string(id_) + " was closed meanwhile");
  std::size_t next = 0;
  for (const Piece::Span& span : piece.spans) {
    for (std::size_t i = 0; i < span.count; ++i) {
      table_.add(call.group, span.region, call.rows[span.first + i], piece.digests[next++]);
    }
  }
  for (const auto& [key, entry] : legs_) {
    if (entry.leg->cancelled.load(std::memory_order_relaxed)) continue;
    auto at = call.matches.find(entry.leg.get());
    if (at == call.matches.end()) at = call.matches.emplace(entry.leg.get(), match(*entry.leg, call)).first;
    entry.session->publish(entry.leg, batches_for(*entry.leg, at->second, call, piece));
    if (!call.small) entry.session->post(entry.leg, false);
  }
}

std::vector<Batch> SourceGrant::batches_for(LegOut& leg, const Match& match, const Call& call, const Piece& piece) {
  std::vector<Batch> batches;
  for (std::size_t g = 0; g < match.index.size(); ++g) {
    const auto& index = match.index[g];
    if (index.empty()) continue;
    const LegGroup& group = leg.table.groups()[g];
    auto& source_pages = leg.source_pages[g];
    std::size_t digest_at = 0;
    for (const Piece::Span& span : piece.spans) {
      const std::uint64_t* digests = piece.digests.data() + digest_at;
      digest_at += span.count;
      const auto slices = leg.slices_from(g, span.region);
      if (slices.empty()) continue;
      for (std::size_t i = 0; i < span.count; ++i) {
        const std::int64_t k = index[span.first + i];
        if (k == kNotReserved) {
          ++leg.skipped;
        } else if (source_pages[static_cast<std::size_t>(k)] == kNoPage) {
          source_pages[static_cast<std::size_t>(k)] = call.pages[span.first + i];
        }
      }
      for (const auto& [region, s] : slices) {
        const SliceSource& source = leg.sources()[group.first_slice + s];
        RunBuilder runs(batches, static_cast<std::uint32_t>(g), s, source.pages_per_frame, false);
        for (std::size_t i = 0; i < span.count; ++i) {
          const std::int64_t k = index[span.first + i];
          if (k == kNotReserved) continue;
          if (leg.spec.verify) {
            leg.content[group.ordinal(static_cast<std::uint64_t>(k), s)] =
                source.whole_page ? digests[i] : partial_digest(source, call.pages[span.first + i]);
          }
          runs.add(static_cast<std::uint64_t>(k));
        }
        runs.flush();
      }
    }
  }
  return batches;
}

void SourceGrant::attach(const LegOutSpec& spec, std::vector<Slice> slices, std::vector<AttachGroup> groups) {
  if (spec.verify && !digests_) {
    throw std::invalid_argument("verify: grant " + std::to_string(id_) + " was made without digests");
  }
  std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.group < b.group; });
  std::vector<LegGroup> leg_groups;
  std::vector<std::uint64_t> first_tokens;
  for (AttachGroup& group : groups) {
    leg_groups.push_back(
        {.group = group.group, .tokens_per_page = group.tokens_per_page, .logical = std::move(group.logical)});
    first_tokens.push_back(group.first_token);
  }
  auto leg = std::make_shared<LegOut>(spec, LegTable(std::move(slices), std::move(leg_groups)), std::move(first_tokens),
                                      sender_.pool(), sender_.frame_bytes());
  Entry entry{sender_.session(spec.session, spec.generation), leg};
  std::uint64_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) refuse_closed("grant " + std::to_string(id_) + " was closed");
    const LegKey key{spec.session, spec.reservation};
    if (legs_.contains(key)) {
      throw std::invalid_argument("duplicate: reservation " + std::to_string(spec.reservation) +
                                  " is already attached");
    }
    entry.session->attach(leg);
    legs_.emplace(key, entry);
    entry.session->publish(leg, backlog(*leg, bytes));
    if (commit_) entry.session->commit(leg, commit_);
  }
  entry.session->post(leg, bytes <= kSmallBytes && leg->table.n_chunks() <= kSmallRecordChunks);
}

std::vector<Batch> SourceGrant::backlog(LegOut& leg, std::uint64_t& bytes) const {
  std::vector<Batch> batches;
  for (std::size_t g = 0; g < leg.table.groups().size(); ++g) {
    const LegGroup& group = leg.table.groups()[g];
    if (group.n_slices == 0) continue;
    const std::uint32_t from = *leg.source_group(g);
    std::vector<std::optional<SourceTable::Row>> rows;
    for (std::size_t k = 0; k < group.logical.size(); ++k) {
      rows.push_back(table_.find(from, group.logical[k]));
      if (rows.back()) leg.source_pages[g][k] = table_.page(from, *rows.back());
    }
    for (std::uint32_t s = 0; s < group.n_slices; ++s) {
      const SliceSource& source = leg.sources()[group.first_slice + s];
      const bool recheck = leg.spec.verify && !source.whole_page;
      RunBuilder runs(batches, static_cast<std::uint32_t>(g), s, source.pages_per_frame, recheck);
      std::uint64_t reserved = 0;
      for (std::size_t k = 0; k < rows.size(); ++k) {
        if (!rows[k] || !table_.written(from, source.region_index, *rows[k])) continue;
        if (leg.spec.verify) leg.content[group.ordinal(k, s)] = table_.digest(from, source.region_index, *rows[k]);
        runs.add(k);
        ++reserved;
      }
      runs.flush();
      bytes += reserved * source.chunk_bytes();
      // Once a source region, however many slices are cut from it.
      const bool first_of_region = leg.slices_from(g, source.region_index).front().second == s;
      if (first_of_region) leg.skipped += table_.chunks(from, source.region_index) - reserved;
    }
  }
  return batches;
}

void SourceGrant::post_all(bool small) {
  std::vector<Entry> entries;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, entry] : legs_) entries.push_back(entry);
  }
  for (const Entry& entry : entries) entry.session->post(entry.leg, small);
}

void SourceGrant::commit(std::uint64_t n_tokens, std::string aux) {
  const std::lock_guard writing(write_mutex_);
  std::vector<Entry> entries;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) refuse_closed("grant " + std::to_string(id_) + " was closed");
    if (commit_) refuse_closed("grant " + std::to_string(id_) + " was committed before");
    commit_ = std::make_shared<const Commit>(Commit{n_tokens, std::move(aux)});
    for (const auto& [key, entry] : legs_) {
      entry.session->commit(entry.leg, commit_);
      entries.push_back(entry);
    }
  }
  for (const Entry& entry : entries) entry.session->post(entry.leg, entry.leg->table.n_chunks() <= kSmallRecordChunks);
}

void SourceGrant::close_admission(std::uint32_t session, std::uint64_t reservation) {
  const Entry entry = find(session, reservation);
  if (entry.leg) entry.session->close_admission(entry.leg);
}

void SourceGrant::detach(std::uint32_t session, std::uint64_t reservation) {
  const Entry entry = find(session, reservation);
  if (!entry.leg) return;
  entry.session->detach(entry.leg);
  const std::lock_guard lock(mutex_);
  const auto at = legs_.find({session, reservation});
  if (at != legs_.end() && at->second.leg == entry.leg) legs_.erase(at);
}

std::vector<std::uint64_t> SourceGrant::digests(std::uint32_t session, std::uint64_t reservation, std::uint64_t first,
                                                std::uint64_t count) const {
  const Entry entry = find(session, reservation);
  if (!entry.leg) {
    throw Error("grant " + std::to_string(id_) + " has no leg for reservation " + std::to_string(reservation) +
                " in session " + std::to_string(session));
  }
  return entry.session->digests(entry.leg, first, count);
}

std::uint64_t SourceGrant::written() const {
  const std::lock_guard lock(mutex_);
  return table_.chunks();
}

std::int64_t SourceGrant::highest_logical(std::uint32_t group) const {
  const std::lock_guard lock(mutex_);
  return table_.highest_logical(group);
}

std::uint64_t SourceGrant::skipped(std::uint64_t reservation) const {
  const std::lock_guard lock(mutex_);
  std::uint64_t skipped = 0;
  for (const auto& [key, entry] : legs_) {
    if (key.second == reservation) skipped += entry.leg->skipped;
  }
  return skipped;
}

void SourceGrant::end_writes() {
  closing_.store(true, std::memory_order_relaxed);
  const std::lock_guard writing(write_mutex_);
}

void SourceGrant::close() {
  end_writes();
  std::map<LegKey, Entry> legs;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    legs.swap(legs_);
    table_.clear();
  }
  for (const auto& [key, entry] : legs) entry.session->detach(entry.leg);
}

SourceGrant::Entry SourceGrant::find(std::uint32_t session, std::uint64_t reservation) const {
  const std::lock_guard lock(mutex_);
  const auto at = legs_.find({session, reservation});
  return at == legs_.end() ? Entry{} : at->second;
}

}  // namespace kvxfer
