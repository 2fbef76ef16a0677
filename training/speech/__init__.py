"""Data, training and score of ``pocket-speech``."""
