#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/shared_memory.hpp"

using kvxfer::SharedMemory;

namespace {

std::size_t size_of(int fd) {
  struct stat status {};
  REQUIRE(fstat(fd, &status) == 0);
  return static_cast<std::size_t>(status.st_size);
}

}  // namespace

TEST_CASE("shared memory can neither shrink nor grow, nor lose its seals") {
  SharedMemory memory(3 * 4'096, "kvxfer-test");
  errno = 0;
  CHECK(ftruncate(memory.fd(), 4'096) == -1);
  CHECK(errno == EPERM);
  CHECK(ftruncate(memory.fd(), 5 * 4'096) == -1);
  CHECK(fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_WRITE) == -1);
  CHECK(size_of(memory.fd()) == 3 * 4'096);
  CHECK(kvxfer::sealed_against_shrinking(memory.fd()));
}

TEST_CASE("shared memory starts as zeros and is seen by a second mapping") {
  SharedMemory memory(10'000, "kvxfer-test");
  CHECK(std::all_of(memory.data(), memory.data() + memory.nbytes(), [](auto b) { return b == 0; }));
  void* other = mmap(nullptr, memory.nbytes(), PROT_READ, MAP_SHARED, memory.fd(), 0);
  REQUIRE(other != MAP_FAILED);
  memory.data()[9'999] = 7;
  CHECK(static_cast<const std::uint8_t*>(other)[9'999] == 7);
  munmap(other, memory.nbytes());
}

TEST_CASE("a peer's mapping outlives the owner's close") {
  SharedMemory memory(4'096, "kvxfer-test");
  void* other = mmap(nullptr, 4'096, PROT_READ, MAP_SHARED, memory.fd(), 0);
  REQUIRE(other != MAP_FAILED);
  memory.data()[0] = 9;
  memory.close();
  memory.close();
  CHECK(memory.data() == nullptr);
  CHECK(memory.fd() == -1);
  CHECK(static_cast<const std::uint8_t*>(other)[0] == 9);
  munmap(other, 4'096);
}

TEST_CASE("the descriptor does not leak into executed programs") {
  SharedMemory memory(4'096, "kvxfer-test");
  CHECK((fcntl(memory.fd(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("memory that could shrink is told apart") {
  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(unsealed >= 0);
  CHECK_FALSE(kvxfer::sealed_against_shrinking(unsealed));
  REQUIRE(fcntl(unsealed, F_ADD_SEALS, F_SEAL_GROW) == 0);
  CHECK_FALSE(kvxfer::sealed_against_shrinking(unsealed));
  close(unsealed);
  CHECK_FALSE(kvxfer::sealed_against_shrinking(unsealed));  // not a descriptor any more
}

TEST_CASE("sizes that cannot be are refused before anything is created") {
  CHECK_THROWS_AS(SharedMemory(0, "none"), std::invalid_argument);
  CHECK_THROWS_AS(SharedMemory(std::numeric_limits<std::size_t>::max(), "all"), std::invalid_argument);
}

TEST_CASE("huge pages come in whole pages or fail with the call's name") {
  try {
    SharedMemory memory(1, "kvxfer-test", true);
    CHECK(memory.nbytes() == std::size_t{2} << 20);
    memory.data()[memory.nbytes() - 1] = 1;
  } catch (const std::system_error& e) {
    const std::string message = e.what();
    CHECK_MESSAGE(message.find("kvxfer-test") != std::string::npos, message);
  }
}
