"""Pages of what is kept, for how long, where, and what is erased."""
