"""The inputs of each task, checked and bounded before credit is held. Pure."""
