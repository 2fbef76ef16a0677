"""Entering the console: one-time links and sessions."""
