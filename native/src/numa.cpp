// Placement on NUMA nodes: mbind and move_pages without libnuma.
#include "headwater/numa.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "headwater/failure.hpp"

namespace headwater {

namespace {

// From the kernel's interface, whose header belongs to libnuma's package on many systems.
constexpr int kPolicyBind = 2;
constexpr int kPolicyInterleave = 3;

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::size_t kBitsPerWord = 8 * sizeof(unsigned long);

[[noreturn]] void fail(const Mapping& mapping, const char* call, int error) {
    const bool is_forbidden = error == EPERM || error == ENOSYS || error == EACCES;
    throw Failure(is_forbidden ? FailureKind::kNotPermitted : FailureKind::kSegment,
                  system_message("segment '" + mapping.name() + "': " + call, error));
}

// A mapping of its own for one stretch of the file. Each change of policy cuts a mapping in two,
// and a process may have some 65,000 of them: fewer than a large model has experts and shards.
class Stretch {
  public:
    Stretch(const Mapping& mapping, std::uint64_t begin, std::uint64_t end)
        : begin_(begin), num_bytes_(end - begin) {
        base_ = ::mmap(nullptr, num_bytes_, PROT_READ, MAP_SHARED, mapping.file().fd(),
                       static_cast<off_t>(begin));
        if (base_ == MAP_FAILED) {
            fail(mapping, "cannot map it once more", errno);
        }
    }
    ~Stretch() { ::munmap(base_, num_bytes_); }
    Stretch(const Stretch&) = delete;
    Stretch& operator=(const Stretch&) = delete;

    std::byte* at(std::uint64_t file_offset) const {
        return static_cast<std::byte*>(base_) + (file_offset - begin_);
    }

  private:
    std::uint64_t begin_;
    std::uint64_t num_bytes_;
    void* base_;
};

std::vector<unsigned long> node_mask(const std::vector<int>& nodes) {
    const int last = *std::max_element(nodes.begin(), nodes.end());
    std::vector<unsigned long> mask(static_cast<std::size_t>(last) / kBitsPerWord + 1);
    for (const int node : nodes) {
        const auto bit = static_cast<std::size_t>(node);
        mask[bit / kBitsPerWord] |= 1UL << (bit % kBitsPerWord);
    }
    return mask;
}

}  // namespace

void place_pages(const Mapping& mapping, const std::vector<PayloadRange>& ranges,
                 const std::vector<int>& nodes) {
    if (ranges.empty() || nodes.empty()) {
        return;
    }
    std::vector<PayloadRange> pages;  // begin and end in the file
    for (const auto& [offset, num_bytes] : ranges) {
        mapping.at(offset, num_bytes);  // throws when out of bounds
        const std::uint64_t begin = (kHeaderBytes + offset + kPageBytes - 1) / kPageBytes;
        const std::uint64_t end = (kHeaderBytes + offset + num_bytes) / kPageBytes;
        if (begin < end) {
            pages.emplace_back(begin * kPageBytes, end * kPageBytes);
        }
    }
    if (pages.empty()) {
        return;
    }
    const auto [first, last] = std::minmax_element(
        pages.begin(), pages.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    const Stretch stretch(mapping, first->first, last->second);
    const std::vector<unsigned long> mask = node_mask(nodes);
    const int policy = nodes.size() == 1 ? kPolicyBind : kPolicyInterleave;
    for (const auto& [begin, end] : pages) {
        // The kernel counts one bit less than it is told.
        if (::syscall(SYS_mbind, stretch.at(begin), end - begin, policy, mask.data(),
                      mask.size() * kBitsPerWord + 1, 0U) != 0) {
            fail(mapping, "mbind", errno);
        }
    }
}

std::vector<int> nodes_of_pages(const Mapping& mapping, const std::vector<std::uint64_t>& offsets) {
    std::vector<void*> pages;
    pages.reserve(offsets.size());
    for (const std::uint64_t offset : offsets) {
        const std::byte* byte = mapping.at(offset, 1);
        // Only pages that this process has seen are known to the kernel by address.
        static_cast<void>(*static_cast<const volatile std::byte*>(byte));
        const auto address = reinterpret_cast<std::uintptr_t>(byte);
        pages.push_back(reinterpret_cast<void*>(address / kPageBytes * kPageBytes));
    }
    std::vector<int> nodes(offsets.size(), -1);
    if (!pages.empty() &&
        ::syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) {
        fail(mapping, "move_pages", errno);
    }
    return nodes;
}

}  // namespace headwater
