"""Pages about the catalog file and the plans for its models."""
