"""Shared by all dialects: authentication, guards, bodies, responses and streams."""
