#include "headwater/file_reader.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <utility>

#include "headwater/failure.hpp"

namespace headwater {

namespace {

constexpr std::uint64_t kChunkBytes = 8 << 20;

[[noreturn]] void fail_file(const std::string& path, const std::string& problem) {
    throw Failure(FailureKind::kCheckpoint, path + ": " + problem);
}

LockedFile open_for_reading(const std::string& path) {
    LockedFile file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file.is_open()) {
        fail_file(path, system_message("cannot open it", errno));
    }
    return file;
}

std::uint64_t file_bytes(const std::string& path, const LockedFile& file) {
    struct stat status{};
    if (::fstat(file.fd(), &status) != 0) {
        fail_file(path, system_message("cannot read its status", errno));
    }
    return static_cast<std::uint64_t>(status.st_size);
}

}  // namespace

LoadJob::LoadJob(std::shared_ptr<Mapping> mapping, const std::vector<Piece>& pieces,
                 int num_threads)
    : mapping_(std::move(mapping)) {
    add_pieces(pieces);
    num_running_ = std::max(1, num_threads);
    threads_.reserve(static_cast<std::size_t>(num_running_));
    const int num_to_start = num_running_;
    for (int i = 0; i < num_to_start; ++i) {
        threads_.emplace_back([this] { work(); });
    }
}

LoadJob::~LoadJob() { cancel(); }  // threads_ is the last member: joined before the rest goes

void LoadJob::add_pieces(const std::vector<Piece>& pieces) {
    std::map<std::string, std::pair<std::size_t, std::uint64_t>> index_and_bytes;
    for (const Piece& piece : pieces) {
        auto found = index_and_bytes.find(piece.path);
        if (found == index_and_bytes.end()) {
            LockedFile file = open_for_reading(piece.path);
            const std::uint64_t size = file_bytes(piece.path, file);
            found = index_and_bytes.emplace(piece.path, std::pair(files_.size(), size)).first;
            files_.push_back({piece.path, std::move(file)});
        }
        const auto [file_index, size] = found->second;
        if (piece.file_offset > size || piece.num_bytes > size - piece.file_offset) {
            fail_file(piece.path, "has " + std::to_string(size) + " bytes, but " +
                                      std::to_string(piece.num_bytes) + " are needed at offset " +
                                      std::to_string(piece.file_offset) +
                                      "; it is truncated, fetch it again");
        }
        mapping_->writable_at(piece.dest_offset, piece.num_bytes);
        for (std::uint64_t done = 0; done < piece.num_bytes; done += kChunkBytes) {
            chunks_.push_back({file_index, piece.file_offset + done,
                               std::min(kChunkBytes, piece.num_bytes - done),
                               piece.dest_offset + done});
        }
        total_bytes_ += piece.num_bytes;
    }
    // In the order of the disk, whatever the order of the payload.
    std::sort(chunks_.begin(), chunks_.end(), [](const Chunk& a, const Chunk& b) {
        return std::pair(a.file_index, a.file_offset) < std::pair(b.file_index, b.file_offset);
    });
}

void LoadJob::work() noexcept {
    std::exception_ptr failure;
    try {
        while (!should_stop_) {
            const std::size_t i = next_chunk_++;
            if (i >= chunks_.size()) {
                break;
            }
            read_chunk(chunks_[i]);
            loaded_bytes_ += chunks_[i].num_bytes;
        }
    } catch (...) {
        failure = std::current_exception();
        should_stop_ = true;
    }
    const std::lock_guard lock(mutex_);
    if (failure && !failure_) {
        failure_ = failure;
    }
    if (--num_running_ == 0) {
        forget_files();
        is_done_.notify_all();
    }
}

void LoadJob::read_chunk(const Chunk& chunk) {
    const File& source = files_[chunk.file_index];
    mapping_->populate(chunk.dest_offset, chunk.num_bytes);
    std::byte* dest = mapping_->writable_at(chunk.dest_offset, chunk.num_bytes);
    std::uint64_t done = 0;
    while (done < chunk.num_bytes) {
        const auto offset = static_cast<off_t>(chunk.file_offset + done);
        const ssize_t got = ::pread(source.file.fd(), dest + done, chunk.num_bytes - done, offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            fail_file(source.path,
                      system_message("cannot read at offset " + std::to_string(offset), errno));
        }
        if (got == 0) {
            fail_file(source.path, "ended at offset " + std::to_string(offset) + " while " +
                                       std::to_string(chunk.num_bytes - done) +
                                       " more bytes were needed; it was truncated meanwhile");
        }
        done += static_cast<std::uint64_t>(got);
    }
    ::posix_fadvise(source.file.fd(), static_cast<off_t>(chunk.file_offset),
                    static_cast<off_t>(chunk.num_bytes), POSIX_FADV_DONTNEED);
}

void LoadJob::forget_files() const noexcept {
    // Once more as a whole, for pages that two chunks share and for what was read ahead.
    for (const File& source : files_) {
        ::posix_fadvise(source.file.fd(), 0, 0, POSIX_FADV_DONTNEED);
    }
}

bool LoadJob::wait(std::uint64_t timeout_ms) {
    std::unique_lock lock(mutex_);
    const auto timeout = std::chrono::milliseconds(timeout_ms);
    if (!is_done_.wait_for(lock, timeout, [this] { return num_running_ == 0; })) {
        return false;
    }
    if (failure_) {
        std::rethrow_exception(failure_);
    }
    if (loaded_bytes_ < total_bytes_) {
        throw Failure(FailureKind::kCancelled, "segment '" + mapping_->name() +
                                                   "': loading was cancelled after " +
                                                   std::to_string(loaded_bytes_) + " of " +
                                                   std::to_string(total_bytes_) + " bytes");
    }
    return true;
}

}  // namespace headwater
