"""Data, training and score of ``pocket-chat``."""
