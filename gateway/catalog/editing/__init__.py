"""Changing a catalog file: what a new text would change, and saving it."""
