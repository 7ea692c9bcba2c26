// Products whose activations are two BF16 numbers each: the nearest one and, of what that leaves,
// the nearest one again, 16 bits instead of 8. Weights are read once for both.
#pragma once

#include "headwater/kernels.hpp"

namespace headwater {

// The table of the instruction set with such products; nothing else is different.
const Kernels& kernels_in_two_pieces(Isa isa);

}  // namespace headwater
