// The threads that update a chunk, each a part of it.
#pragma once

#include <vector>

#include "crew.hpp"
#include "record.hpp"

namespace tz {

class ChunkCrew {
  public:
    // std::invalid_argument unless there are 1 to 256 threads.
    explicit ChunkCrew(unsigned threads);
    // Updates the whole chunk and returns its checksums, where the record goes to a file. One caller at a
    // time.
    Sums update(const Record& record, const ChunkView& chunk);

    void stop() { crew_.stop(); }  // ends its threads

  private:
    Crew crew_;
    std::vector<Sums> partial_;  // per crew member
};

}  // namespace tz
