// LoadJob: reads pieces of files straight into a segment's payload, on several threads.
//
// There is never a second copy in memory: each chunk goes from the file into its final place, and
// the page cache is told at once to forget the file's pages.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "headwater/shm_segment.hpp"

namespace headwater {

// Bytes [file_offset, file_offset + num_bytes) of a file, and where in the payload they go.
struct Piece {
    std::string path;
    std::uint64_t file_offset;
    std::uint64_t num_bytes;
    std::uint64_t dest_offset;
};

class LoadJob {
  public:
    // Opens the files, checks every piece against its file and the payload, and starts the threads.
    LoadJob(std::shared_ptr<Mapping> mapping, const std::vector<Piece>& pieces, int num_threads);
    // Cancels what is not done and waits for the threads.
    ~LoadJob();
    LoadJob(const LoadJob&) = delete;
    LoadJob& operator=(const LoadJob&) = delete;

    std::uint64_t total_bytes() const noexcept { return total_bytes_; }
    std::uint64_t loaded_bytes() const noexcept { return loaded_bytes_; }

    // Waits up to `timeout_ms` for the end: false while threads are at work; true when everything
    // is loaded; throws the first failure, or that of cancellation.
    bool wait(std::uint64_t timeout_ms);
    // Lets every thread stop after its current chunk.
    void cancel() noexcept { should_stop_ = true; }

  private:
    struct File {
        std::string path;
        LockedFile file;
    };
    struct Chunk {
        std::size_t file_index;
        std::uint64_t file_offset;
        std::uint64_t num_bytes;
        std::uint64_t dest_offset;
    };

    void add_pieces(const std::vector<Piece>& pieces);
    void work() noexcept;
    void read_chunk(const Chunk& chunk);
    void forget_files() const noexcept;

    std::shared_ptr<Mapping> mapping_;
    std::vector<File> files_;
    std::vector<Chunk> chunks_;
    std::uint64_t total_bytes_ = 0;
    std::atomic<std::uint64_t> loaded_bytes_ = 0;
    std::atomic<std::size_t> next_chunk_ = 0;
    std::atomic<bool> should_stop_ = false;
    std::mutex mutex_;
    std::condition_variable is_done_;
    int num_running_ = 0;
    std::exception_ptr failure_;
    std::vector<std::jthread> threads_;
};

}  // namespace headwater
