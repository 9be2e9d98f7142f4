// The legs of one session and generation, by reservation and leg. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "lanes/leg_in.hpp"

namespace kvxfer {

class LegRegistry {
 public:
  // nullptr where it is unknown.
  std::shared_ptr<LegIn> find(std::uint64_t reservation, std::uint32_t leg) const {
    const std::lock_guard lock(mutex_);
    const auto at = legs_.find({reservation, leg});
    return at == legs_.end() ? nullptr : at->second;
  }
  // False where it is already there.
  bool insert(std::uint64_t reservation, std::uint32_t leg, std::shared_ptr<LegIn> in) {
    const std::lock_guard lock(mutex_);
    return legs_.emplace(std::pair(reservation, leg), std::move(in)).second;
  }
  void remove(std::uint64_t reservation, std::uint32_t leg) {
    const std::lock_guard lock(mutex_);
    legs_.erase({reservation, leg});
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::shared_ptr<LegIn>> legs_;
};

}  // namespace kvxfer
