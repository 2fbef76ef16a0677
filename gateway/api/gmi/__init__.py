"""GMI Cloud's request queue, for its clients."""
