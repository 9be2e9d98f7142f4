#include "core/completion_queue.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "core/error.hpp"

namespace kvxfer {

CompletionQueue::CompletionQueue() : event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_fd_ < 0) throw_errno("eventfd");
}

CompletionQueue::~CompletionQueue() { close(event_fd_); }

void CompletionQueue::push(Completion completion) {
  std::lock_guard lock(mutex_);
  const bool was_empty = pending_.empty();
  pending_.push_back(std::move(completion));
  // The count only rises from empty, and drain() resets it under the same lock, so it can neither overflow nor be lost.
  if (was_empty) eventfd_write(event_fd_, 1);
}

std::vector<Completion> CompletionQueue::drain() {
  std::vector<Completion> taken;
  std::lock_guard lock(mutex_);
  if (pending_.empty()) return taken;
  eventfd_t count = 0;
  eventfd_read(event_fd_, &count);
  taken.swap(pending_);
  return taken;
}

}  // namespace kvxfer
