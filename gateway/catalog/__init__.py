"""The catalog: what is on sale, what it costs, and whether it can be had now."""
