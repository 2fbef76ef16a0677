"""Our side of the queue: enqueueing, waiting, following events, and the health of each queue."""
