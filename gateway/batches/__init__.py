"""Files, and batches of requests that are run when there is room, at a lower price."""
