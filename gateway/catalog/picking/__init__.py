"""Finds models: filters and order of the catalog, prices of typical orders, picks by wish. Pure."""
