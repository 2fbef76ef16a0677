"""Pictures in conversations: how they are read, where their tokens are, and the vision tower."""
