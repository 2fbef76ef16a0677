"""Text embeddings by encoders and decoders; a step batches inputs of many requests."""
