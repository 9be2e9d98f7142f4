#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "core/completion_queue.hpp"
#include "core/pool_map.hpp"
#include "lanes/peer_memory.hpp"
#include "lanes/receiver.hpp"

using kvxfer::CompletionQueue;
using kvxfer::LegIn;
using kvxfer::LegPages;
using kvxfer::PeerMemory;
using kvxfer::PoolMap;
using kvxfer::Receiver;

namespace {

// Lanes keep the peer's memory mapped for as long as they run, whatever Python has let go of.
struct PeerMemoryHandle {
  std::shared_ptr<const PeerMemory> memory;
};

using RegionTuple = std::tuple<std::int64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

std::shared_ptr<const PeerMemory> make_peer_memory(int pid, int pidfd,
                                                   const std::vector<std::vector<RegionTuple>>& regions,
                                                   const std::vector<int>& fds, int table_fd, std::uint64_t probe_ptr,
                                                   const std::string& probe) {
  std::vector<std::vector<PeerMemory::RegionClaim>> claims;
  for (const auto& group : regions) {
    auto& out = claims.emplace_back();
    for (const auto& [fd, at, page_stride, page_bytes, n_pages] : group) {
      const auto index = static_cast<int>(std::clamp<std::int64_t>(fd, -1, 1 << 20));
      out.push_back({index, at, page_stride, page_bytes, n_pages});
    }
  }
  return std::make_shared<const PeerMemory>(pid, pidfd, claims, fds, table_fd, probe_ptr, probe);
}

std::array<std::uint8_t, 16> read_epoch(const nb::bytes& epoch) {
  std::array<std::uint8_t, 16> out{};
  if (epoch.size() != out.size()) throw std::invalid_argument("an epoch has 16 bytes");
  const std::string_view bytes = view(epoch);
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

std::vector<std::uint64_t> to_vector(const U64In& array) { return {array.data(), array.data() + array.size()}; }

std::vector<LegPages> read_groups(const nb::sequence& groups) {
  std::vector<LegPages> out;
  for (nb::handle item : groups) {
    const auto [group, tokens_per_page, logical, pool] =
        nb::cast<std::tuple<std::uint32_t, std::uint32_t, U64In, U64In>>(item);
    out.push_back({group, tokens_per_page, to_vector(logical), to_vector(pool)});
  }
  return out;
}

nb::tuple to_tuple(LegIn::Report report) {
  nb::dict placed;
  for (const auto& [lane, bitmap] : report.placed) placed[nb::int_(lane)] = to_bytes(bitmap);
  return nb::make_tuple(placed, to_array(std::move(report.folds)), report.violations, report.bytes_landed);
}

}  // namespace

void bind_receiver(nb::module_& m) {
  nb::class_<PeerMemoryHandle>(m, "PeerMemory", "Prefill's pool as the local lane reads it.")
      .def(
          "__init__",
          [](PeerMemoryHandle* self, int pid, int pidfd, const std::vector<std::vector<RegionTuple>>& regions,
             const std::vector<int>& fds, int table_fd, std::uint64_t probe_ptr, const nb::bytes& probe) {
            const std::string probe_bytes(view(probe));
            nb::gil_scoped_release release;
            new (self) PeerMemoryHandle{make_peer_memory(pid, pidfd, regions, fds, table_fd, probe_ptr, probe_bytes)};
          },
          nb::arg("pid"), nb::arg("pidfd"), nb::arg("regions"), nb::arg("fds"), nb::arg("table_fd"),
          nb::arg("probe_ptr"), nb::arg("probe"))
      .def_prop_ro("how", [](const PeerMemoryHandle& self) { return self.memory->how(); });

  nb::class_<Receiver>(m, "Receiver", "Decode's ends of the lanes of one session and generation, one thread each.")
      .def(
          "__init__",
          [](Receiver* self, CompletionQueue& cq, const PoolMap& pool, std::uint32_t session, const nb::bytes& epoch,
             std::uint32_t generation, std::uint64_t max_record_bytes) {
            new (self) Receiver(cq, pool, session, read_epoch(epoch), generation, max_record_bytes);
          },
          nb::arg("cq"), nb::arg("pool"), nb::arg("session"), nb::arg("epoch"), nb::arg("generation"),
          nb::arg("max_record_bytes"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "add_lane",
          [](Receiver& self, std::uint32_t lane, const std::string& kind, int fd,
             std::optional<PeerMemoryHandle> source) {
            nb::gil_scoped_release release;
            self.add_lane(lane, kind, fd, source ? source->memory : nullptr);
          },
          nb::arg("lane"), nb::arg("kind"), nb::arg("fd"), nb::arg("source") = nb::none())
      .def(
          "open_leg",
          [](Receiver& self, std::uint64_t reservation, std::uint32_t leg, bool verify, const nb::bytes& slices,
             const nb::sequence& groups) {
            std::vector<LegPages> pages = read_groups(groups);
            nb::gil_scoped_release release;
            self.open_leg(reservation, leg, verify, view(slices), std::move(pages));
          },
          nb::arg("reservation"), nb::arg("leg"), nb::arg("verify"), nb::arg("slices"), nb::arg("groups"))
      .def("revoke", &Receiver::revoke, nb::arg("reservation"), nb::arg("leg"),
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "report",
          [](Receiver& self, std::uint64_t reservation, std::uint32_t leg) {
            LegIn::Report report;
            {
              nb::gil_scoped_release release;
              report = self.report(reservation, leg);
            }
            return to_tuple(std::move(report));
          },
          nb::arg("reservation"), nb::arg("leg"))
      .def(
          "digests",
          [](const Receiver& self, std::uint64_t reservation, std::uint32_t leg) {
            std::vector<std::uint64_t> digests;
            {
              nb::gil_scoped_release release;
              digests = self.digests(reservation, leg);
            }
            return to_array(std::move(digests));
          },
          nb::arg("reservation"), nb::arg("leg"))
      .def("forget", &Receiver::forget, nb::arg("reservation"), nb::arg("leg"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("sunk_frames", &Receiver::sunk_frames)
      .def("fence", &Receiver::fence, nb::call_guard<nb::gil_scoped_release>());
}
