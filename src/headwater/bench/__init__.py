"""Measurements of our kernels against what the machine can do, in the same run."""
