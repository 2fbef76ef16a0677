"""Texts to vectors: encoders and decoders, many inputs of many requests in a step."""
