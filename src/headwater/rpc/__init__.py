"""gRPC servers and channels as every process of ours makes them."""

import os

# gRPC's core would write a line per lost connection; what matters of that we log ourselves.
# It reads this when it is first imported, which this package does.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
