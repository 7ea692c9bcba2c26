// Streams an answer of Headwater's router: `generate [options] PROMPT`, see usage() below.
// Ctrl-C cancels the request.

#include <grpcpp/grpcpp.h>
#include <pthread.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <thread>

#include "error_details.pb.h"
#include "headwater/v1/router_service.grpc.pb.h"

namespace {

namespace v1 = headwater::v1;

struct Options {
    std::string address = "127.0.0.1:50050";
    std::string prompt;
    bool is_chat = false;
    int max_tokens = 64;
    int deadline_seconds = 60;
};

[[noreturn]] void usage() {
    std::cerr << "usage: generate [--address HOST:PORT] [--chat] [--max-tokens N] "
                 "[--deadline SECONDS] PROMPT\n";
    std::exit(2);
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string_view name = argv[i];
        const auto value = [&] { return ++i < argc ? argv[i] : (usage(), nullptr); };
        if (name == "--chat") {
            options.is_chat = true;
        } else if (name == "--address") {
            options.address = value();
        } else if (name == "--max-tokens") {
            options.max_tokens = std::atoi(value());
        } else if (name == "--deadline") {
            options.deadline_seconds = std::atoi(value());
        } else {
            options.prompt = name;
        }
    }
    return options;
}

v1::GenerateRequest request_of(const Options& options) {
    v1::GenerateRequest request;
    if (options.is_chat) {
        v1::ChatMessage* message = request.mutable_chat()->add_messages();
        message->set_role("user");
        message->set_content(options.prompt);
    } else {
        request.set_text(options.prompt);
    }
    request.mutable_sampling()->set_temperature(0);
    request.mutable_sampling()->set_max_tokens(options.max_tokens);
    return request;
}

// Cancels a call at SIGINT. A thread waits for it, for hardly anything may be called in a handler.
class CancelAtInterrupt {
  public:
    // To be made before any other thread, which then leaves the signal to ours.
    explicit CancelAtInterrupt(grpc::ClientContext& context) {
        sigemptyset(&interrupt_);
        sigaddset(&interrupt_, SIGINT);
        pthread_sigmask(SIG_BLOCK, &interrupt_, nullptr);
        waiter_ = std::thread([this, &context] {
            int number = 0;
            sigwait(&interrupt_, &number);
            context.TryCancel();  // of a call that has ended it does nothing
        });
    }

    ~CancelAtInterrupt() {
        pthread_kill(waiter_.native_handle(), SIGINT);
        waiter_.join();
    }

    CancelAtInterrupt(const CancelAtInterrupt&) = delete;
    CancelAtInterrupt& operator=(const CancelAtInterrupt&) = delete;

  private:
    sigset_t interrupt_{};
    std::thread waiter_;
};

void report(const grpc::Status& status) {
    std::cerr << "\nstatus " << status.error_code() << ": " << status.error_message() << '\n';
    google::rpc::Status full;
    full.ParseFromString(status.error_details());
    for (const google::protobuf::Any& detail : full.details()) {
        google::rpc::ErrorInfo info;
        google::rpc::BadRequest bad;
        if (detail.UnpackTo(&info)) {
            std::cerr << "reason: " << info.reason() << '\n';
        } else if (detail.UnpackTo(&bad)) {
            for (const auto& violation : bad.field_violations()) {
                std::cerr << "field: " << violation.field() << ": " << violation.description()
                          << '\n';
            }
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const Options options = parse(argc, argv);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(options.deadline_seconds));
    const CancelAtInterrupt cancel(context);
    const auto stub = v1::RouterService::NewStub(
        grpc::CreateChannel(options.address, grpc::InsecureChannelCredentials()));
    const auto reader = stub->Generate(&context, request_of(options));
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
        std::cout << response.text() << std::flush;
        if (response.has_usage()) {
            std::cout << '\n'
                      << v1::FinishReason_Name(response.finish_reason()) << ": "
                      << response.usage().prompt_tokens() << " prompt tokens, "
                      << response.usage().completion_tokens() << " new" << std::endl;
        }
    }
    const grpc::Status status = reader->Finish();
    if (!status.ok()) {
        report(status);
    }
    return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}
