"""Weights and operations of neural networks, computed from their configurations without torch."""
