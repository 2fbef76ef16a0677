"""Workflow runs: planned, executed step by step, and closed as one request."""
