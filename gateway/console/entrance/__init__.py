"""Entering and leaving the console, and what visitors do with their own sessions."""
