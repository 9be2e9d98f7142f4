#include "core/shared_memory.hpp"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <limits>
#include <stdexcept>

#include "core/error.hpp"

namespace kvxfer {

namespace {

constexpr unsigned kHugePageBits = 21;
constexpr std::size_t kHugePage = std::size_t{1} << kHugePageBits;

}  // namespace

SharedMemory::SharedMemory(std::size_t nbytes, const std::string& name, bool huge_pages) : nbytes_(nbytes) {
  const std::size_t unit = huge_pages ? kHugePage : 1;
  if (nbytes == 0) throw std::invalid_argument("bounds: shared memory needs at least one byte");
  if (nbytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) - unit) {
    throw std::invalid_argument("bounds: shared memory of " + std::to_string(nbytes) + " bytes is too large");
  }
  nbytes_ = (nbytes + unit - 1) / unit * unit;

  unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if (huge_pages) flags |= MFD_HUGETLB | (kHugePageBits << MFD_HUGE_SHIFT);
  fd_ = memfd_create(name.c_str(), flags);
  if (fd_ < 0) throw_errno("memfd_create(" + name + ")");
  try {
    if (ftruncate(fd_, static_cast<off_t>(nbytes_)) != 0) throw_errno("ftruncate(" + name + ")");
    if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw_errno("fcntl(F_ADD_SEALS, " + name + ")");
    }
    void* mapped = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (mapped == MAP_FAILED) throw_errno("mmap(" + name + ")");
    data_ = static_cast<std::uint8_t*>(mapped);
  } catch (...) {
    close();
    throw;
  }
}

SharedMemory::~SharedMemory() { close(); }

void SharedMemory::close() noexcept {
  if (data_ != nullptr) munmap(data_, nbytes_);
  if (fd_ >= 0) ::close(fd_);
  data_ = nullptr;
  fd_ = -1;
}

bool sealed_against_shrinking(int fd) noexcept {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

}  // namespace kvxfer
