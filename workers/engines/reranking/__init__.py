"""Reranking by cross-encoders; a step batches pairs of many requests."""
