"""The catalog: the models on sale, their prices and their availability."""
