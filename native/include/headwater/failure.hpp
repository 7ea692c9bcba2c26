// Failures of the native core: a kind that names the Python exception, and a finished sentence.
#pragma once

#include <stdexcept>
#include <string>

namespace headwater {

// Each kind becomes the class of the same name in headwater.errors.
enum class FailureKind {
    kSegment,
    kSegmentExists,
    kSegmentNotFound,
    kSharedMemoryFull,
    kCheckpoint,
    kCancelled,
    kConfig,
    kNotPermitted,
    kInternal,
};

class Failure : public std::runtime_error {
  public:
    Failure(FailureKind kind, const std::string& message)
        : std::runtime_error(message), kind_(kind) {}

    FailureKind kind() const noexcept { return kind_; }

  private:
    FailureKind kind_;
};

// "<what>: <text of the errno value>".
std::string system_message(const std::string& what, int error_number);

}  // namespace headwater
