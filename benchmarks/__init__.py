"""Benchmarks, which print ratios to a peer; not part of the tests."""
