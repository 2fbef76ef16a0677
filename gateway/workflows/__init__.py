"""Requests whose model is a workflow: planned, run step by step, closed as one."""
