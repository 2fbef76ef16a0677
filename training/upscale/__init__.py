"""Training and score of ``pocket-upscale``."""
