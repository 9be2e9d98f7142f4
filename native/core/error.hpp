// What the core throws in the caller's thread. Python sees kvxfer._native.NativeError, ValueError or RuntimeError.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kvxfer {

// A failed call: NativeError in Python. Calls that set errno throw std::system_error, which becomes the same.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void throw_errno(const std::string& call, int error = errno) {
  throw std::system_error(error, std::generic_category(), call);
}

}  // namespace kvxfer
