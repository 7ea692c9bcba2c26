"""The KV pool: paged memory in a shared segment, leased to one request at a time."""
