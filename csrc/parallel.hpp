// Runs one function on several threads for the length of a call.
#pragma once

#include <cstddef>
#include <functional>

namespace tz {

// part(i) for i in [0, parts), on at most `threads` threads; the caller's is one of them.
// `part` must not throw. A thread that cannot be started is done without.
void parallel(unsigned threads, std::size_t parts, const std::function<void(std::size_t)>& part);

}  // namespace tz
