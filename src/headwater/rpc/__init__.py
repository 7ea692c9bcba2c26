"""gRPC servers and channels as every process of ours makes them."""
