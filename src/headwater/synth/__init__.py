"""Checkpoints of published shapes with random weights, to measure and to size a machine with."""
