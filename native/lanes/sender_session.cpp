#include "lanes/sender_session.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/error.hpp"

namespace kvxfer {

SenderSession::SenderSession(CompletionQueue& queue, GenerationTable& table, std::uint32_t session,
                             const std::array<std::uint8_t, 16>& epoch, std::uint32_t generation, std::uint32_t n_lanes)
    : queue_(queue), table_(table), session_(session), epoch_(epoch), generation_(generation), lanes_(n_lanes) {}

SenderSession::~SenderSession() { close(); }

void SenderSession::add_lane(std::uint32_t lane, LaneKind kind, int fd) {
  const std::lock_guard lock(mutex_);
  const std::string name = "lane " + std::to_string(lane) + " of session " + std::to_string(session_);
  if (closed_) throw Error("closed: " + name + " comes after its generation was closed");
  if (lane >= lanes_.size()) throw Error(name + " is not among its " + std::to_string(lanes_.size()) + " lanes");
  if (lanes_[lane]) throw Error(name + " is already connected in generation " + std::to_string(generation_));
  auto added = std::make_unique<SenderLane>(*this, lane, kind, fd);
  try {
    added->start();
  } catch (...) {
    added->disown();
    throw;
  }
  lanes_[lane] = std::move(added);
  push(Kind::kLaneUp, static_cast<std::int32_t>(lane), {});
}

void SenderSession::close() {
  const std::lock_guard closing(close_mutex_);
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto& lane : lanes_) {
      if (lane) lane->stop();
    }
    for (auto& [reservation, leg] : legs_) end(leg, LegOut::End::kFail, "lane: the session's lanes were closed");
  }
  for (auto& lane : lanes_) {
    if (lane) lane->join();
  }
  const std::lock_guard lock(mutex_);
  legs_.clear();
  active_.clear();
}

void SenderSession::attach(const Leg& leg) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error("closed: the lanes of generation " + std::to_string(generation_) + " were closed");
  bool by_reference = false;
  const SenderLane* down = nullptr;
  for (const std::uint32_t lane : leg->spec.lanes) {
    if (lane >= lanes_.size()) {
      throw std::invalid_argument("bounds: lane " + std::to_string(lane) + " of " + std::to_string(lanes_.size()));
    }
    // A lane that is still to be connected may turn out to be local.
    if (!lanes_[lane] || lanes_[lane]->kind() == LaneKind::kLocal) by_reference = true;
    if (lanes_[lane] && !lanes_[lane]->up()) down = lanes_[lane].get();
  }
  if (legs_.contains(leg->spec.reservation)) {
    throw std::invalid_argument("duplicate: reservation " + std::to_string(leg->spec.reservation) +
                                " is already attached in this session");
  }
  legs_.emplace(leg->spec.reservation, leg);
  if (by_reference) {
    try {
      leg->pin = table_.acquire();
    } catch (...) {
      legs_.erase(leg->spec.reservation);
      throw;
    }
  }
  if (down != nullptr) end(leg, LegOut::End::kFail, "lane: lane " + std::to_string(down->index()) + " is down");
}

void SenderSession::publish(const Leg& leg, std::span<const Batch> batches) {
  const std::lock_guard lock(mutex_);
  if (leg->end != LegOut::End::kOpen || batches.empty()) return;
  for (const Batch& batch : batches) {
    // A backlog written page by page becomes whole frames again.
    if (!leg->queue.empty() && !batch.progress) {
      Batch& last = leg->queue.back();
      if (!last.progress && last.group == batch.group && last.slice == batch.slice && last.recheck == batch.recheck &&
          last.page_first + last.n_pages == batch.page_first &&
          last.n_pages + batch.n_pages <= leg->source(last).pages_per_frame) {
        last.n_pages += batch.n_pages;
        continue;
      }
    }
    leg->queue.push_back(batch);
  }
  activate(leg);
}

void SenderSession::commit(const Leg& leg, std::shared_ptr<const Commit> commit) {
  const std::lock_guard lock(mutex_);
  if (leg->end != LegOut::End::kOpen || leg->commit) return;
  leg->commit = std::move(commit);
  activate(leg);
}

void SenderSession::post(const Leg& leg, bool small) {
  std::unique_lock lock(mutex_);
  if (small) {
    for (const std::uint32_t lane : leg->spec.lanes) {
      if (!leg->active) return;
      if (lanes_[lane]) lanes_[lane]->post_from_caller(lock);
    }
  }
  wake_for(*leg);
}

void SenderSession::close_admission(const Leg& leg) {
  const std::lock_guard lock(mutex_);
  end(leg, LegOut::End::kDrain, "aborted");
}

void SenderSession::detach(const Leg& leg) {
  std::unique_lock lock(mutex_);
  if (leg->end == LegOut::End::kOpen && !leg->reported) {
    leg->silent = true;
    end(leg, LegOut::End::kDrain, "detached");
  }
  leg_ended_.wait(lock, [&] { return leg->reported; });
  const auto at = legs_.find(leg->spec.reservation);
  if (at != legs_.end() && at->second == leg) legs_.erase(at);
}

std::vector<std::uint64_t> SenderSession::digests(const Leg& leg, std::uint64_t first, std::uint64_t count) {
  const std::uint64_t n_chunks = leg->table.n_chunks();
  if (first > n_chunks || count > n_chunks - first) {
    throw std::invalid_argument("bounds: digests [" + std::to_string(first) + ", +" + std::to_string(count) +
                                ") of a leg of " + std::to_string(n_chunks) + " chunks");
  }
  std::vector<std::uint64_t> out(count, 0);
  if (leg->content.empty()) return out;
  const std::lock_guard lock(mutex_);
  const std::vector<std::uint64_t> posted = leg->posted_on_any();
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t at = first + i;
    if ((posted[at / 64] >> (at % 64)) & 1) out[i] = leg->content[at];
  }
  return out;
}

// ---- with the mutex held
// ----------------------------------------------------------------------------------------------

SendJob SenderSession::next_job(const SenderLane& lane) {
  // In turn, so that a short handoff does not wait behind a long one.
  for (std::size_t seen = 0; seen < active_.size(); ++seen) {
    if (turn_ >= active_.size()) turn_ = 0;
    const Leg leg = active_[turn_++];
    const int position = leg->lane_position(lane.index());
    if (position < 0) continue;
    const auto at = static_cast<std::size_t>(position);
    // A same-host reader digests as it copies: it has no use for progress records.
    while (lane.kind() == LaneKind::kLocal && !leg->queue.empty() && leg->queue.front().progress)
      leg->queue.pop_front();
    SendJob job;
    if (!leg->queue.empty()) {
      job = write_job(lane, leg, at);
    } else if (leg->commit && leg->shares[at].record == LegOut::Record::kDue &&
               !(at == 0 && leg->spec.verify && leg->posting > 0)) {
      // The folds speak of all lanes, so the first lane's record waits for the others' last chunks.
      leg->shares[at].record = LegOut::Record::kSending;
      job = record_job(lane, leg, at, SendJob::What::kCommit);
    }
    deactivate_if_idle(leg);
    if (job.leg) return job;
  }
  return {};
}

SendJob SenderSession::write_job(const SenderLane& lane, const Leg& leg, std::size_t position) {
  const Batch batch = leg->queue.front();
  leg->queue.pop_front();
  if (batch.progress) return record_job(lane, leg, position, SendJob::What::kProgress);
  SendJob job;
  job.leg = leg;
  job.what = SendJob::What::kWrite;
  job.position = position;
  job.batch = batch;
  job.reading = lane.kind() == LaneKind::kTcp || batch.recheck;
  if (leg->pin) job.pin = *leg->pin;
  ++leg->posting;
  if (job.reading) ++leg->reading;
  return job;
}

SendJob SenderSession::record_job(const SenderLane&, const Leg& leg, std::size_t position, SendJob::What what) {
  SendJob job;
  job.leg = leg;
  job.what = what;
  job.position = position;
  if (leg->pin) job.pin = *leg->pin;
  job.posted = leg->shares[position].posted;
  job.n_posted = leg->shares[position].n_posted;
  if (what == SendJob::What::kCommit) {
    job.commit = leg->commit;
    job.with_folds = leg->spec.verify && position == 0;
    if (job.with_folds) job.present = leg->posted_on_any();
  }
  return job;
}

void SenderSession::finish(const SenderLane& lane, SendJob& job) {
  const Leg leg = std::exchange(job.leg, nullptr);
  if (!leg) return;
  LegOut::LaneShare& share = leg->shares[job.position];
  if (job.what == SendJob::What::kWrite) {
    --leg->posting;
    if (std::exchange(job.reading, false)) --leg->reading;
    leg->mark_posted(job.batch, job.position);
    if (leg->posting == 0 && leg->commit && leg->shares[0].record == LegOut::Record::kDue) {
      const auto& first = lanes_[leg->spec.lanes[0]];
      if (first && first.get() != &lane) first->wake();
    }
  } else if (job.what == SendJob::What::kCommit && share.record == LegOut::Record::kSending) {
    share.record = LegOut::Record::kSent;
  }
  settle(leg);
}

void SenderSession::abandon(SendJob& job) {
  const Leg leg = std::exchange(job.leg, nullptr);
  if (!leg) return;
  if (job.what == SendJob::What::kWrite) --leg->posting;
  if (std::exchange(job.reading, false)) --leg->reading;
  settle(leg);
}

void SenderSession::stop_reading(SendJob& job) {
  if (!std::exchange(job.reading, false)) return;
  --job.leg->reading;
  settle(job.leg);
}

void SenderSession::end(const Leg& leg, LegOut::End how, const std::string& cause) {
  // An error after an abort still makes it a failure: what was in flight was not delivered.
  if (leg->reported || leg->end == LegOut::End::kFail || leg->end == how) return;
  leg->end = how;
  leg->cause = cause;
  leg->cancelled.store(true, std::memory_order_relaxed);
  leg->queue.clear();
  drop_active(leg);
  for (const std::uint32_t lane : leg->spec.lanes) {
    if (lane < lanes_.size() && lanes_[lane]) lanes_[lane]->wake();
  }
  settle(leg);
}

void SenderSession::lane_down(const SenderLane& lane, const std::string& cause) {
  push(Kind::kLaneDown, static_cast<std::int32_t>(lane.index()), cause);
  const std::string why = "lane: lane " + std::to_string(lane.index()) + ": " + cause;
  for (auto& [reservation, leg] : legs_) {
    if (leg->lane_position(lane.index()) >= 0) end(leg, LegOut::End::kFail, why);
  }
}

bool SenderSession::confirm(const SenderLane& lane, std::uint64_t reservation, std::uint32_t leg_index) {
  const auto at = legs_.find(reservation);
  if (at == legs_.end()) return true;
  const Leg leg = at->second;
  const int position = leg->lane_position(lane.index());
  if (position < 0 || leg->spec.leg != leg_index) return false;
  LegOut::LaneShare& share = leg->shares[static_cast<std::size_t>(position)];
  if (share.record == LegOut::Record::kDue) return false;
  // While it counts as being sent its last byte may be out already: the sender has yet to take the mutex.
  share.record = LegOut::Record::kConfirmed;
  settle(leg);
  return true;
}

void SenderSession::activate(const Leg& leg) {
  if (leg->active) return;
  leg->active = true;
  active_.push_back(leg);
}

void SenderSession::deactivate_if_idle(const Leg& leg) {
  if (leg->queue.empty() && !leg->records_pending()) drop_active(leg);
}

void SenderSession::drop_active(const Leg& leg) {
  if (!std::exchange(leg->active, false)) return;
  const auto at = std::find(active_.begin(), active_.end(), leg);
  if (static_cast<std::size_t>(at - active_.begin()) < turn_) --turn_;
  active_.erase(at);
}

void SenderSession::wake_for(const LegOut& leg) {
  if (!leg.active) return;
  std::size_t jobs = leg.commit ? leg.spec.lanes.size() : leg.queue.size();
  for (const std::uint32_t lane : leg.spec.lanes) {
    if (jobs == 0) return;
    if (lanes_[lane] && lanes_[lane]->rouse_if_idle()) --jobs;
  }
}

void SenderSession::settle(const Leg& leg) {
  if (leg->reported) return;
  if (leg->end == LegOut::End::kOpen) {
    if (!leg->commit || !records_delivered(*leg)) return;
    leg->end = LegOut::End::kDrain;
  }
  if (leg->reading == 0) report(leg);
}

bool SenderSession::records_delivered(const LegOut& leg) const {
  for (std::size_t i = 0; i < leg.shares.size(); ++i) {
    const auto& lane = lanes_[leg.spec.lanes[i]];
    if (!lane) return false;
    const auto wanted = lane->kind() == LaneKind::kLocal ? LegOut::Record::kConfirmed : LegOut::Record::kSent;
    if (leg.shares[i].record != wanted) return false;
  }
  return true;
}

void SenderSession::report(const Leg& leg) {
  leg->reported = true;
  drop_active(leg);
  if (leg->pin) {
    table_.release(*leg->pin);
    leg->pin.reset();
  }
  const bool failed = leg->end == LegOut::End::kFail;
  if (!leg->silent) {
    queue_.push({.kind = failed ? Kind::kLegFailed : Kind::kLegDrained,
                 .session = session_,
                 .generation = generation_,
                 .lane = -1,
                 .reservation = leg->spec.reservation,
                 .leg = leg->spec.leg,
                 .data = failed ? leg->cause : leg->posted_counts()});
  }
  leg_ended_.notify_all();
}

void SenderSession::push(Kind kind, std::int32_t lane, std::string data) {
  queue_.push({.kind = kind,
               .session = session_,
               .generation = generation_,
               .lane = lane,
               .reservation = 0,
               .leg = 0,
               .data = std::move(data)});
}

}  // namespace kvxfer
