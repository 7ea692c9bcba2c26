#include "headwater/cpu.hpp"

#include <cpuid.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <tuple>

namespace headwater {

namespace {

// Linux gives the large AMX state to processes that ask for it (arch_prctl ARCH_REQ_XCOMP_PERM).
constexpr int kArchReqXcompPerm = 0x1023;
constexpr int kXfeatureXtiledata = 18;

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

bool has_amx() {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    if (!has_avx512() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) {
        return false;
    }
    const bool has_bf16_tiles = (edx >> 22 & 1) != 0 && (edx >> 24 & 1) != 0;
    const bool has_fp16 = (edx >> 23 & 1) != 0;
    return has_bf16_tiles && has_fp16 && __builtin_cpu_supports("gfni") &&
           syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

// A CPU's place: `rank` counts the CPUs of its node that come before it in the order of use.
struct Place {
    int cpu;
    int node;
    bool is_second_thread;
    int rank;
};

int node_of(int cpu) {
    std::error_code error;
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
        const std::string name = entry.path().filename();
        if (name.starts_with("node")) {
            return std::stoi(name.substr(4));
        }
    }
    return 0;
}

// The lowest-numbered hardware thread of the core is its first.
bool is_second_thread(int cpu) {
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                       "/topology/thread_siblings_list");
    int first = cpu;
    return file >> first && first != cpu;
}

}  // namespace

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kScalar:
            return "scalar";
        case Isa::kAvx2:
            return "avx2";
        case Isa::kAvx512:
            return "avx512";
        case Isa::kAmx:
            return "amx";
    }
    return "unknown";
}

std::vector<Isa> supported_isas() {
    static const std::vector<Isa> kSupported = [] {
        std::vector<Isa> isas;
        if (has_amx()) {
            isas.push_back(Isa::kAmx);
        }
        if (has_avx512()) {
            isas.push_back(Isa::kAvx512);
        }
        if (has_avx2()) {
            isas.push_back(Isa::kAvx2);
        }
        isas.push_back(Isa::kScalar);
        return isas;
    }();
    return kSupported;
}

std::optional<Isa> supported_isa(std::string_view name) {
    for (const Isa isa : supported_isas()) {
        if (name == isa_name(isa)) {
            return isa;
        }
    }
    return std::nullopt;
}

bool wants_several_rows() { return __builtin_cpu_is("intel"); }

std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
    // A machine may have more CPUs than cpu_set_t has room for: grow until the kernel is content.
    for (int count = 1024; count <= 1 << 20; count *= 2) {
        cpu_set_t* set = CPU_ALLOC(count);
        const std::size_t num_bytes = CPU_ALLOC_SIZE(count);
        const bool is_known = sched_getaffinity(0, num_bytes, set) == 0;
        for (int cpu = 0; is_known && cpu < count; ++cpu) {
            if (CPU_ISSET_S(cpu, num_bytes, set)) {
                cpus.push_back(cpu);
            }
        }
        CPU_FREE(set);
        if (is_known) {
            break;
        }
    }
    return cpus;
}

std::vector<int> worker_cpus(int num_threads) {
    std::vector<Place> places;
    for (const int cpu : allowed_cpus()) {
        places.push_back({cpu, node_of(cpu), is_second_thread(cpu), 0});
    }
    if (static_cast<std::size_t>(num_threads) > places.size()) {
        return {};
    }
    std::ranges::stable_sort(places, {}, &Place::is_second_thread);
    std::map<int, int> taken;
    for (Place& place : places) {
        place.rank = taken[place.node]++;
    }
    std::ranges::sort(places, {}, [](const Place& p) {
        return std::tuple(p.is_second_thread, p.rank, p.node, p.cpu);
    });
    places.resize(static_cast<std::size_t>(num_threads));
    std::ranges::stable_sort(places, {}, &Place::node);
    std::vector<int> cpus;
    for (const Place& place : places) {
        cpus.push_back(place.cpu);
    }
    return cpus;
}

}  // namespace headwater
