"""The console's pages, one module per group; each ends with its ``HANDLERS``."""
