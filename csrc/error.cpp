#include "error.hpp"

#include <system_error>

namespace tz {

std::string errno_text(int code) {
    return std::generic_category().message(code);
}

}  // namespace tz
