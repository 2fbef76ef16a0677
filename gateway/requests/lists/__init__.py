"""Lists of requests: their filters."""
