"""The gateway's side of the queue: enqueueing, waiting, following events, and queue health."""
