"""Checks of what people and clients enter, before anything else sees it. Pure."""
