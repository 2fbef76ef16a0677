"""Data, training and score of ``pocket-video``."""
