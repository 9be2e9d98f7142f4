// One request's source pages, digested when written (S3), and the legs that carry them to readers. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lanes/leg_out.hpp"
#include "lanes/sender_session.hpp"
#include "lanes/source_grant_table.hpp"

namespace kvxfer {

class Sender;

class SourceGrant {
 public:
  struct AttachGroup {
    std::uint32_t group = 0;
    std::uint32_t tokens_per_page = 0;
    std::uint64_t first_token = 0;
    std::vector<std::uint64_t> logical;
  };

  // `sender` must outlive the grant. Without `digests` no leg with verify can be attached.
  SourceGrant(Sender& sender, std::uint64_t id, bool digests);
  ~SourceGrant();
  SourceGrant(const SourceGrant&) = delete;
  SourceGrant& operator=(const SourceGrant&) = delete;

  // Pins and digests the pages in the calling thread and queues them for every attached leg, piece by piece. Returns
  // the bytes digested (without digests: the bytes of the pages). Throws std::invalid_argument("bounds: ...",
  // "duplicate: ...") with nothing queued, std::runtime_error("closed: ...").
  std::uint64_t write(std::uint32_t group, std::span<const std::uint64_t> logical, std::span<const std::uint64_t> pages,
                      std::span<const std::uint32_t> regions, bool progress);
  // Queues all that was written. Throws std::invalid_argument("bounds: ...", "duplicate: ..."), Error, and
  // std::runtime_error("closed: ...").
  void attach(const LegOutSpec& spec, std::vector<Slice> slices, std::vector<AttachGroup> groups);
  // Waits for a write in another thread. Throws std::runtime_error("closed: ...") the second time.
  void commit(std::uint64_t n_tokens, std::string aux);
  // Unknown legs are fine: nothing reads a source for them.
  void close_admission(std::uint32_t session, std::uint64_t reservation);
  // When it returns no lane reads the sources for this leg. Unknown legs are fine.
  void detach(std::uint32_t session, std::uint64_t reservation);
  // Throws Error for an unknown leg, std::invalid_argument("bounds: ...").
  std::vector<std::uint64_t> digests(std::uint32_t session, std::uint64_t reservation, std::uint64_t first,
                                     std::uint64_t count) const;
  std::uint64_t written() const;
  std::int64_t highest_logical(std::uint32_t group) const;
  std::uint64_t skipped(std::uint64_t reservation) const;
  // Ends writes in other threads: once it has returned, none reads a source. Legs and digests stay. Idempotent.
  void end_writes();
  // The same, and ends all legs; no source is read after it returns. Idempotent.
  void close();

 private:
  using LegKey = std::pair<std::uint32_t, std::uint64_t>;  // session, reservation
  struct Entry {
    std::shared_ptr<SenderSession> session;
    std::shared_ptr<LegOut> leg;
  };
  struct Piece;
  struct Call;
  struct Match;

  Entry find(std::uint32_t session, std::uint64_t reservation) const;
  void publish(Call& call, const Piece& piece);
  static std::vector<Batch> batches_for(LegOut& leg, const Match& match, const Call& call, const Piece& piece);
  static Match match(const LegOut& leg, const Call& call);
  void post_all(bool small);
  std::vector<Batch> backlog(LegOut& leg, std::uint64_t& bytes) const;

  Sender& sender_;
  const std::uint64_t id_;
  const bool digests_;
  std::atomic<bool> closing_{false};

  // Serialises write and commit; held for as long as they take.
  std::mutex write_mutex_;
  // Guards what follows; held for short.
  mutable std::mutex mutex_;
  SourceTable table_;
  std::map<LegKey, Entry> legs_;
  std::shared_ptr<const Commit> commit_;
  bool closed_ = false;
};

}  // namespace kvxfer
