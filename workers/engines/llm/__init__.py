"""Language models: any Hugging Face causal decoder of a supported family, continuously batched."""
