#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "core/completion_queue.hpp"
#include "core/pool_map.hpp"
#include "lanes/sender.hpp"

using kvxfer::CompletionQueue;
using kvxfer::LaneKind;
using kvxfer::PoolMap;
using kvxfer::Sender;
using kvxfer::SourceGrant;

namespace {

std::array<std::uint8_t, 16> read_epoch(const nb::bytes& epoch) {
  std::array<std::uint8_t, 16> out{};
  if (epoch.size() != out.size()) throw std::invalid_argument("an epoch has 16 bytes");
  const std::string_view bytes = view(epoch);
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

LaneKind read_kind(const std::string& kind) {
  if (kind == "tcp") return LaneKind::kTcp;
  if (kind == "local") return LaneKind::kLocal;
  throw std::invalid_argument("a lane is tcp or local, not " + kind);
}

template <typename Array>
auto span_of(const Array& array) {
  return std::span(array.data(), array.size());
}

std::vector<SourceGrant::AttachGroup> read_groups(const nb::sequence& groups) {
  std::vector<SourceGrant::AttachGroup> out;
  for (nb::handle item : groups) {
    const auto [group, tokens_per_page, first_token, logical] =
        nb::cast<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, U64In>>(item);
    out.push_back({group, tokens_per_page, first_token, {logical.data(), logical.data() + logical.size()}});
  }
  return out;
}

void attach(SourceGrant& self, std::uint32_t session, std::uint32_t generation, std::uint64_t reservation,
            std::uint32_t leg, bool verify, bool carries_aux, std::vector<std::uint32_t> lanes, const nb::bytes& slices,
            const nb::sequence& groups) {
  std::vector<SourceGrant::AttachGroup> pages = read_groups(groups);
  const std::string_view slice_bytes = view(slices);
  nb::gil_scoped_release release;
  self.attach({session, generation, reservation, leg, verify, carries_aux, std::move(lanes)},
              kvxfer::parse_slices(slice_bytes), std::move(pages));
}

}  // namespace

void bind_sender(nb::module_& m) {
  using release_gil = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<SourceGrant>(m, "SourceGrant",
                          "One request's source pages, digested when written, and the legs that carry them to readers.")
      .def(
          "write",
          [](SourceGrant& self, std::uint32_t group, const U64In& logical, const U64In& pages, const U32In& regions,
             bool progress) {
            nb::gil_scoped_release release;
            return self.write(group, span_of(logical), span_of(pages), span_of(regions), progress);
          },
          nb::arg("group"), nb::arg("logical"), nb::arg("pages"), nb::arg("regions"), nb::arg("progress") = false)
      .def("attach", &attach, nb::arg("session"), nb::arg("generation"), nb::arg("reservation"), nb::arg("leg"),
           nb::arg("verify"), nb::arg("carries_aux"), nb::arg("lanes"), nb::arg("slices"), nb::arg("groups"))
      .def(
          "commit",
          [](SourceGrant& self, std::uint64_t n_tokens, const nb::bytes& aux) {
            std::string copy(view(aux));
            nb::gil_scoped_release release;
            self.commit(n_tokens, std::move(copy));
          },
          nb::arg("n_tokens"), nb::arg("aux"))
      .def("close_admission", &SourceGrant::close_admission, nb::arg("session"), nb::arg("reservation"), release_gil())
      .def("detach", &SourceGrant::detach, nb::arg("session"), nb::arg("reservation"), release_gil())
      .def(
          "digests",
          [](const SourceGrant& self, std::uint32_t session, std::uint64_t reservation, std::uint64_t first,
             std::uint64_t count) {
            std::vector<std::uint64_t> digests;
            {
              nb::gil_scoped_release release;
              digests = self.digests(session, reservation, first, count);
            }
            return to_array(std::move(digests));
          },
          nb::arg("session"), nb::arg("reservation"), nb::arg("first"), nb::arg("count"))
      .def("written", &SourceGrant::written, release_gil())
      .def("highest_logical", &SourceGrant::highest_logical, nb::arg("group"), release_gil())
      .def("skipped", &SourceGrant::skipped, nb::arg("reservation"), release_gil())
      .def("end_writes", &SourceGrant::end_writes, release_gil())
      .def("close", &SourceGrant::close, release_gil());

  nb::class_<Sender>(m, "Sender", "Prefill's ends of the lanes of all its sessions, one thread each.")
      .def(
          "__init__",
          [](Sender* self, CompletionQueue& cq, const PoolMap& pool, std::uint64_t frame_bytes) {
            new (self) Sender(cq, pool, frame_bytes);
          },
          nb::arg("cq"), nb::arg("pool"), nb::arg("frame_bytes") = kvxfer::wire::kFrameBytes, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>())
      .def_prop_ro("generation_table_fd", &Sender::generation_table_fd)
      .def(
          "open_session",
          [](Sender& self, std::uint32_t session, const nb::bytes& epoch, std::uint32_t generation,
             std::uint32_t n_lanes) {
            const auto epoch_bytes = read_epoch(epoch);
            nb::gil_scoped_release release;
            self.open_session(session, epoch_bytes, generation, n_lanes);
          },
          nb::arg("session"), nb::arg("epoch"), nb::arg("generation"), nb::arg("n_lanes"))
      .def(
          "add_lane",
          [](Sender& self, std::uint32_t session, std::uint32_t generation, std::uint32_t lane, const std::string& kind,
             int fd) {
            const LaneKind lane_kind = read_kind(kind);
            nb::gil_scoped_release release;
            self.add_lane(session, generation, lane, lane_kind, fd);
          },
          nb::arg("session"), nb::arg("generation"), nb::arg("lane"), nb::arg("kind"), nb::arg("fd"))
      .def("close_session", &Sender::close_session, nb::arg("session"), nb::arg("generation"), release_gil())
      .def("grant", &Sender::grant, nb::arg("grant"), nb::arg("digests") = true, nb::keep_alive<0, 1>())
      .def("close", &Sender::close, release_gil());
}
