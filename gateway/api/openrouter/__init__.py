"""OpenRouter's API, for its clients: models, credits, routing and price caps."""
