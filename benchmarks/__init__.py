"""Measurements, printed as ratios beside a peer; never part of the tests."""
