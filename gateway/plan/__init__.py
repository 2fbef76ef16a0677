"""Capacity planning: memory, speed and cost of a model on given hardware (``tollgate plan``)."""
