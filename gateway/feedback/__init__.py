"""Feedback of accounts on their requests."""
