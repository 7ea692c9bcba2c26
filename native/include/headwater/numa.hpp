// Placement of a segment's pages on NUMA nodes, by plain system calls.
//
// A policy belongs to the shared-memory object, not to a mapping: it holds for whoever touches the
// pages first, and as long as the object lives.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "headwater/shm_segment.hpp"

namespace headwater {

// Offset and length in the payload. Bytes.
using PayloadRange = std::pair<std::uint64_t, std::uint64_t>;

// Lets the pages that lie wholly inside each of `ranges` come from `nodes`: from the only one, or
// from all in turn. Pages that are there already stay where they are. Throws
// Failure(kNotPermitted) where the process may not, Failure(kSegment) for other reasons.
void place_pages(const Mapping& mapping, const std::vector<PayloadRange>& ranges,
                 const std::vector<int>& nodes);

// The node of each page that holds a byte at one of `offsets`. Throws as place_pages does.
std::vector<int> nodes_of_pages(const Mapping& mapping, const std::vector<std::uint64_t>& offsets);

}  // namespace headwater
