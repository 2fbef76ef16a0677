"""The small models that Tollgate ships, and the scripts that trained them."""
