"""Batches: files of requests that run when there is capacity, at a lower price."""
