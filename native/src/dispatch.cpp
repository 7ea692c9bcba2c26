// Which table of kernels this process uses.
#include <atomic>
#include <cstdlib>
#include <string>

#include "headwater/failure.hpp"
#include "headwater/kernels.hpp"
#include "two_pieces.hpp"

namespace headwater {

namespace {

constexpr const char* kVariable = "HEADWATER_FORCE_ISA";

std::atomic<bool> are_activations_exact = false;

std::string supported_names() {
    std::string names;
    for (const Isa isa : supported_isas()) {
        names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
    }
    return names;
}

Isa choose() {
    const char* forced = std::getenv(kVariable);
    if (forced == nullptr || *forced == '\0') {
        return supported_isas().front();
    }
    if (const auto isa = supported_isa(forced)) {
        return *isa;
    }
    throw Failure(FailureKind::kConfig, std::string(kVariable) + ": '" + forced +
                                            "' is unknown or not supported by this CPU; " +
                                            "supported here: " + supported_names());
}

}  // namespace

void set_exact_activations(bool are_exact) { are_activations_exact = are_exact; }

const Kernels& kernels_of(Isa isa) {
    if (are_activations_exact) {
        return kernels_in_two_pieces(isa);
    }
    switch (isa) {
        case Isa::kAmx:
            return amx::kKernels;
        case Isa::kAvx512:
            return avx512::kKernels;
        case Isa::kAvx2:
            return avx2::kKernels;
        case Isa::kScalar:
            break;
    }
    return scalar::kKernels;
}

const Kernels& active_kernels() {
    static const Isa kChosen = choose();
    return kernels_of(kChosen);
}

}  // namespace headwater
