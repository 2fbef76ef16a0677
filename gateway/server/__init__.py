"""Serves the application over HTTP, in one process or several that share one socket."""
