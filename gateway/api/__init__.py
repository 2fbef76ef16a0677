"""One module per API dialect, each a thin translation; none holds logic of its own."""
