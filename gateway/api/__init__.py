"""One folder per API dialect, each a thin translation without logic."""
