"""Data, training and score of ``pocket-music``."""
