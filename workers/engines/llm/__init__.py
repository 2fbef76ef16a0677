"""Language models: any Hugging Face causal decoder of a proven family, batched at the step."""
