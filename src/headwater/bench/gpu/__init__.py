"""Measurements on a GPU: the link, stream-loading prefill, hybrid decode."""
