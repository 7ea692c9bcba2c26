"""What runs on a GPU: stream-loading prefill, hybrid decode, and their kernels.

Nothing here is imported unless a GPU is asked for; everything but the Triton kernels also runs on
a CPU, where tests hold it against the reference.
"""
