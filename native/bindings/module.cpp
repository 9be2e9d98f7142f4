#include <exception>
#include <string>
#include <system_error>

#include "bindings/bindings.hpp"
#include "core/error.hpp"

namespace {

// Failed system calls and the core's own failures are one type to Python, so that a caller needs one except clause.
void translate(const std::exception_ptr& exception, void* native_error) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::system_error& e) {
    const std::string message = std::string(e.what()) + " (errno " + std::to_string(e.code().value()) + ")";
    PyErr_SetString(static_cast<PyObject*>(native_error), message.c_str());
  } catch (const kvxfer::Error& e) {
    PyErr_SetString(static_cast<PyObject*>(native_error), e.what());
  }
}

}  // namespace

NB_MODULE(_native, m) {
  // A program that exits without close() leaves objects alive at the interpreter's end. The kernel takes back their
  // memory and sockets, so a page of warnings would only hide the program's own last words.
  nb::set_leak_warnings(false);
  m.doc() = "The C++ core of kvxfer: digests, shared memory, completions and the lanes.";
  nb::object native_error = nb::steal(PyErr_NewExceptionWithDoc(
      "kvxfer._native.NativeError", "A failed call of the core: the message names the call and errno.",
      PyExc_RuntimeError, nullptr));
  m.attr("NativeError") = native_error;
  // The translator lives as long as the process, and so does its reference.
  nb::register_exception_translator(translate, native_error.release().ptr());

  bind_digest(m);
  bind_memory(m);
  bind_completion(m);
  bind_sender(m);
  bind_receiver(m);
}
