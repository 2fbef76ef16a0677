"""Jobs of the console: work that a page starts and does not wait for."""
