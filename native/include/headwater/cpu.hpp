// What this process may use of the machine: instruction sets, and the CPUs of its cpuset.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace headwater {

// Best last. Each one's kernels are compiled for exactly these extensions:
// scalar: plain x86-64; avx2: AVX2, FMA, F16C; avx512: AVX-512 F, BW, VL, VBMI, BF16;
// amx: those and AMX-TILE, AMX-BF16, AVX-512 FP16, GFNI.
enum class Isa { kScalar, kAvx2, kAvx512, kAmx };

const char* isa_name(Isa isa);

// What both the CPU and the kernel offer; best first, scalar always last.
std::vector<Isa> supported_isas();

// The one of them that is called so, if there is.
std::optional<Isa> supported_isa(std::string_view name);

// True on CPUs whose cores come near their memory bandwidth only with several rows in flight
// (measured on Sapphire Rapids: one row 15 GB/s); Zen 4 is faster with one.
bool wants_several_rows();

// The CPUs that this thread may run on, in ascending order.
std::vector<int> allowed_cpus();

// One allowed CPU for each of `num_threads` workers, those of a NUMA node side by side: evenly
// from all nodes, and a core's second hardware thread only when all cores have a worker. Empty
// when there are fewer CPUs than workers.
std::vector<int> worker_cpus(int num_threads);

}  // namespace headwater
