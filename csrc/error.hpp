// An I/O failure: what errno said, a sentence with offset and length, and the path.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace tz {

struct IoError {
    int code = 0;
    std::string message;
    std::string path;
};

class IoFailure : public std::runtime_error {
  public:
    explicit IoFailure(IoError e) : std::runtime_error(e.message), error(std::move(e)) {}
    IoFailure(int code, std::string message, std::string path)
        : IoFailure(IoError{code, std::move(message), std::move(path)}) {}
    IoError error;
};

// The message of errno `code`, for sentences ("...: No space left on device").
std::string errno_text(int code);

}  // namespace tz
