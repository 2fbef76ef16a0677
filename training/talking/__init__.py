"""Data, training and score of ``pocket-talking``."""
