"""Training and score of ``pocket-image``."""
