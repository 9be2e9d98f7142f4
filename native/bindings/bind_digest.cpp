#include <cstring>
#include <stdexcept>

#include "bindings/bindings.hpp"
#include "digest/scattered.hpp"
#include "digest/xxh3.hpp"

namespace digest = kvxfer::digest;

namespace {

constexpr unsigned kMaxThreads = 1024;

unsigned checked_threads(std::int64_t threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("bounds: threads is " + std::to_string(threads) + ", expected 1 to " +
                                std::to_string(kMaxThreads));
  }
  return static_cast<unsigned>(threads);
}

void check_same_length(const char* what, std::size_t length, std::size_t expected) {
  if (length == expected) return;
  throw std::invalid_argument("bounds: " + std::string(what) + " has " + std::to_string(length) +
                              " elements, expected " + std::to_string(expected));
}

// A C-contiguous buffer's bytes, held for the life of this object. Needs the GIL at both ends.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  const void* data() const { return view_.buf; }
  std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

std::uint64_t xxh3_64(nb::handle data) {
  const Buffer buffer(data);
  nb::gil_scoped_release release;
  return digest::xxh3_64(buffer.data(), buffer.nbytes());
}

U64Out digest_scattered(const U64In& ptrs, std::size_t chunk_bytes, std::int64_t threads) {
  const unsigned n_threads = checked_threads(threads);
  std::vector<std::uint64_t> out(ptrs.size());
  {
    nb::gil_scoped_release release;
    digest::digest_scattered(ptrs.data(), ptrs.size(), chunk_bytes, n_threads, out.data());
  }
  return to_array(std::move(out));
}

U64Out digest_strided(const U64In& ptrs, std::size_t runs, std::size_t run_bytes, std::size_t stride) {
  std::vector<std::uint64_t> out(ptrs.size());
  {
    nb::gil_scoped_release release;
    digest::digest_strided(ptrs.data(), ptrs.size(), runs, run_bytes, stride, out.data());
  }
  return to_array(std::move(out));
}

void copy_scattered(const U64In& dst, const U64In& src, std::size_t chunk_bytes, std::int64_t threads) {
  const unsigned n_threads = checked_threads(threads);
  check_same_length("src", src.size(), dst.size());
  nb::gil_scoped_release release;
  digest::copy_scattered(dst.data(), src.data(), dst.size(), chunk_bytes, n_threads);
}

U64Out copy_digest_scattered(const U64In& dst, const U64In& src, std::size_t chunk_bytes, std::int64_t threads) {
  const unsigned n_threads = checked_threads(threads);
  check_same_length("src", src.size(), dst.size());
  std::vector<std::uint64_t> out(dst.size());
  {
    nb::gil_scoped_release release;
    digest::copy_digest_scattered(dst.data(), src.data(), dst.size(), chunk_bytes, n_threads, out.data());
  }
  return to_array(std::move(out));
}

U64Out bind(const U64In& content, std::uint64_t reservation, const nb::bytes& epoch, std::uint32_t leg,
            std::uint32_t group, const U32In& region, const U32In& slice, const U64In& logical) {
  const std::size_t n = content.size();
  check_same_length("region", region.size(), n);
  check_same_length("slice", slice.size(), n);
  check_same_length("logical", logical.size(), n);
  digest::BindKey key{reservation, {}, leg};
  check_same_length("epoch", epoch.size(), sizeof key.epoch);
  std::memcpy(key.epoch, epoch.c_str(), sizeof key.epoch);
  std::vector<std::uint64_t> out(n);
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < n; ++i) {
      out[i] = digest::bind(content.data()[i], key, group, region.data()[i], slice.data()[i], logical.data()[i]);
    }
  }
  return to_array(std::move(out));
}

}  // namespace

void bind_digest(nb::module_& m) {
  m.def("xxh3_64", &xxh3_64, nb::arg("data"), "XXH3-64 of a C-contiguous buffer's bytes.");
  m.def("digest_scattered", &digest_scattered, nb::arg("ptrs"), nb::arg("chunk_bytes"), nb::arg("threads") = 1,
        "XXH3-64 of each chunk of ``chunk_bytes`` contiguous bytes at ``ptrs``.");
  m.def("digest_strided", &digest_strided, nb::arg("ptrs"), nb::arg("runs"), nb::arg("run_bytes"), nb::arg("stride"),
        "XXH3-64 of each chunk made of ``runs`` runs of ``run_bytes``, ``stride`` apart, concatenated.");
  m.def("copy_scattered", &copy_scattered, nb::arg("dst"), nb::arg("src"), nb::arg("chunk_bytes"),
        nb::arg("threads") = 1, "memcpy of each chunk.");
  m.def("copy_digest_scattered", &copy_digest_scattered, nb::arg("dst"), nb::arg("src"), nb::arg("chunk_bytes"),
        nb::arg("threads") = 1, "One fused pass: copies each chunk and returns its XXH3-64.");
  m.def("bind", &bind, nb::arg("content"), nb::arg("reservation"), nb::arg("epoch"), nb::arg("leg"), nb::arg("group"),
        nb::arg("region"), nb::arg("slice"), nb::arg("logical"),
        "The bound digest of each content digest: see kvxfer.digest.");
  m.def("isa", &digest::isa, "The vector path in use: avx512, avx2, neon or scalar.");
}
