"""Decodes media from clients, and encodes media for them."""
