"""What both sides of an engine process agree on: the engine's verbs, its host, the frames."""
