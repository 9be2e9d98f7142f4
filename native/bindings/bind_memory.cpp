#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <tuple>

#include "bindings/bindings.hpp"
#include "core/pool_map.hpp"
#include "core/shared_memory.hpp"

using kvxfer::PoolMap;
using kvxfer::SharedMemory;

namespace {

using RegionTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

PoolMap make_pool_map(const std::vector<std::vector<RegionTuple>>& groups) {
  PoolMap pool;
  for (const auto& regions : groups) {
    auto& group = pool.groups.emplace_back();
    for (const auto& [ptr, page_stride, page_bytes, n_pages] : regions) {
      std::uint64_t last = 0, end = 0;
      if (n_pages > 0 && (__builtin_mul_overflow(n_pages - 1, page_stride, &last) ||
                          __builtin_add_overflow(last, page_bytes, &last) || __builtin_add_overflow(ptr, last, &end))) {
        throw std::invalid_argument("bounds: region " + std::to_string(group.size()) + " of group " +
                                    std::to_string(pool.groups.size() - 1) + " does not fit the address space");
      }
      group.push_back({reinterpret_cast<std::uint8_t*>(ptr), page_stride, page_bytes, n_pages});
    }
  }
  return pool;
}

void zero_runs(const U64In& bases, std::uint64_t runs, std::uint64_t stride, std::uint64_t nbytes) {
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < bases.size(); ++i) {
    auto* base = reinterpret_cast<std::uint8_t*>(bases.data()[i]);
    for (std::uint64_t run = 0; run < runs; ++run) std::memset(base + run * stride, 0, nbytes);
  }
}

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<SharedMemory>(m, "SharedMemory",
                           "A memfd of ``nbytes``, mapped read-write and sealed against shrinking and growing. "
                           "Unmapped when collected or closed.")
      .def(
          "__init__",
          [](SharedMemory* self, std::size_t nbytes, const std::string& name, bool huge_pages) {
            nb::gil_scoped_release release;
            new (self) SharedMemory(nbytes, name, huge_pages);
          },
          nb::arg("nbytes"), nb::arg("name"), nb::arg("huge_pages") = false)
      .def_prop_ro("ptr", [](const SharedMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_prop_ro("nbytes", &SharedMemory::nbytes)
      .def_prop_ro("fd", &SharedMemory::fd)
      .def("close", &SharedMemory::close, nb::call_guard<nb::gil_scoped_release>(),
           "Unmaps and closes; views of the memory must be gone. Idempotent.");

  nb::class_<PoolMap>(m, "PoolMap",
                      "A pool's memory by [group][region]: tuples (ptr, page_stride, page_bytes, n_pages).")
      .def(
          "__init__",
          [](PoolMap* self, const std::vector<std::vector<RegionTuple>>& groups) {
            new (self) PoolMap(make_pool_map(groups));
          },
          nb::arg("groups"));

  m.def("zero_runs", &zero_runs, nb::arg("bases"), nb::arg("runs"), nb::arg("stride"), nb::arg("nbytes"),
        "For each base: zero ``runs`` runs of ``nbytes``, ``stride`` apart.");
}
