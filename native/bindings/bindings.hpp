// What the parts of the extension module share: array views, bytes, and the list of parts.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nb = nanobind;

// Views of C-contiguous host arrays of one dimension. Hold them for as long as the data is used; copy and destroy them
// only with the GIL held. Arrays of another integer type are converted; other dimensions raise TypeError.
using U64In = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using U32In = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using U64Out = nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>;

// Hands the vector's memory to a NumPy array without copying it.
inline U64Out to_array(std::vector<std::uint64_t> values) {
  auto* owner = new std::vector<std::uint64_t>(std::move(values));
  nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::vector<std::uint64_t>*>(p); });
  return U64Out(owner->data(), {owner->size()}, capsule);
}

inline nb::bytes to_bytes(std::string_view data) { return nb::bytes(data.data(), data.size()); }
inline std::string_view view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

void bind_digest(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_completion(nb::module_& m);
void bind_sender(nb::module_& m);
void bind_receiver(nb::module_& m);
