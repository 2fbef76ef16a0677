"""What models understand: reads their vocabularies, and finds the words that they do not know."""
