"""Checks of input from operators and clients, made before it is used. Pure."""
