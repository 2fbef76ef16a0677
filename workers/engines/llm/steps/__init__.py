"""One step of the language engine: its forward passes, and the tokens that come of them."""
