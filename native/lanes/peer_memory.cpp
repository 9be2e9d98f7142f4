#include "lanes/peer_memory.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.hpp"

namespace kvxfer {
namespace {

// Keeps the loads of a copy before the load of the slot that vouches for it. x86 never swaps loads; the compiler might.
inline void order_loads() noexcept {
#if defined(__aarch64__)
  asm volatile("dmb ishld" ::: "memory");
#elif defined(__x86_64__)
  asm volatile("" ::: "memory");
#else
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
#endif
}

// Bytes from the first page's first to the last page's last; false where that wraps.
bool span_of(const PeerMemory::RegionClaim& claim, std::uint64_t& bytes) noexcept {
  bytes = 0;
  if (claim.n_pages == 0) return true;
  return !__builtin_mul_overflow(claim.n_pages - 1, claim.page_stride, &bytes) &&
         !__builtin_add_overflow(bytes, claim.page_bytes, &bytes);
}

int duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw_errno("fcntl(F_DUPFD_CLOEXEC) of the pidfd");
  return copy;
}

}  // namespace

PeerMemory::Mapping::Mapping(int fd, const std::string& name) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) throw Error(name + ": no memfd with seals: " + std::strerror(errno));
  if ((seals & F_SEAL_SHRINK) == 0) throw Error(name + ": not sealed against shrinking");
  struct stat status {};
  if (fstat(fd, &status) != 0) throw_errno("fstat of " + name);
  bytes = static_cast<std::uint64_t>(status.st_size);
  if (bytes == 0) return;
  void* at = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) throw_errno("mmap of " + name);
  base = static_cast<const std::uint8_t*>(at);
}

PeerMemory::Mapping::~Mapping() {
  if (base != nullptr) munmap(const_cast<std::uint8_t*>(base), bytes);
}

PeerMemory::Mapping::Mapping(Mapping&& other) noexcept
    : base(std::exchange(other.base, nullptr)), bytes(std::exchange(other.bytes, 0)) {}

PeerMemory::PeerMemory(pid_t pid, int pidfd, const std::vector<std::vector<RegionClaim>>& regions,
                       std::span<const int> fds, int table_fd, std::uint64_t probe_ptr, std::string_view probe)
    : pid_(pid), pidfd_(duplicate(pidfd)), table_(table_fd, "generation table") {
  mappings_.reserve(fds.size());
  for (std::size_t i = 0; i < fds.size(); ++i) mappings_.emplace_back(fds[i], "memory " + std::to_string(i));
  for (std::size_t g = 0; g < regions.size(); ++g) {
    std::vector<Region>& group = regions_.emplace_back();
    for (std::size_t r = 0; r < regions[g].size(); ++r) {
      const RegionClaim& claim = regions[g][r];
      const std::string name = "group " + std::to_string(g) + ", region " + std::to_string(r);
      std::uint64_t span = 0;
      std::uint64_t end = 0;
      if (!span_of(claim, span) || __builtin_add_overflow(claim.at, span, &end)) throw Error(name + ": size wraps");
      Region& region = group.emplace_back();
      region = {nullptr, claim.at, claim.page_stride, claim.page_bytes, claim.n_pages};
      if (claim.fd < 0) {
        any_remote_ = true;
        continue;
      }
      if (static_cast<std::size_t>(claim.fd) >= mappings_.size()) throw Error(name + ": names a memfd not given");
      const Mapping& mapping = mappings_[static_cast<std::size_t>(claim.fd)];
      if (end > mapping.bytes) {
        throw Error(name + ": reaches to byte " + std::to_string(end) + " of a memfd of " +
                    std::to_string(mapping.bytes));
      }
      any_mapped_ = true;
      region.mapped = mapping.base + claim.at;
      region.address = reinterpret_cast<std::uint64_t>(region.mapped);
    }
  }
  if (!any_remote_) return;
  if (probe.empty()) throw Error("process_vm_readv: no probe to try it on");
  std::string back(probe.size(), '\0');
  const iovec run{reinterpret_cast<void*>(probe_ptr), probe.size()};
  std::string why;
  if (!read({&run, 1}, reinterpret_cast<std::uint8_t*>(back.data()), back.size(), why)) throw Error(why);
  if (back != probe) throw Error("process_vm_readv: process " + std::to_string(pid) + " is not the one that answered");
}

bool PeerMemory::source_intact(std::uint64_t slot, std::uint64_t expected, std::string& why) const {
  order_loads();
  if (slot >= table_.bytes / sizeof(std::uint64_t)) {
    why = "slot " + std::to_string(slot) + " is outside the generation table";
    return false;
  }
  const auto* slots = reinterpret_cast<const std::uint64_t*>(table_.base);
  const std::uint64_t now = __atomic_load_n(slots + slot, __ATOMIC_ACQUIRE);
  if (now != expected) {
    why = "slot " + std::to_string(slot) + " holds " + std::to_string(now) + " and not " + std::to_string(expected) +
          ": the pages may have been reused";
    return false;
  }
  pollfd peer{pidfd_.get(), POLLIN, 0};
  int ready = 0;
  do {
    ready = poll(&peer, 1, 0);
  } while (ready < 0 && errno == EINTR);
  if (ready != 0) {
    why = "process " + std::to_string(pid_) + " is dead";
    return false;
  }
  return true;
}

bool PeerMemory::read(std::span<const iovec> runs, std::uint8_t* to, std::size_t bytes, std::string& why) const {
  const iovec local{to, bytes};
  const ssize_t got = process_vm_readv(pid_, &local, 1, runs.data(), runs.size(), 0);
  if (got == static_cast<ssize_t>(bytes)) return true;
  why = "process_vm_readv from process " + std::to_string(pid_) + ": " +
        (got < 0 ? std::strerror(errno) : std::to_string(got) + " of " + std::to_string(bytes) + " bytes");
  return false;
}

const char* PeerMemory::how() const noexcept {
  return any_mapped_ && any_remote_ ? "mixed" : any_remote_ ? "process_vm_readv" : "mapped";
}

}  // namespace kvxfer
