"""Shared by several trainings: the loop, denoisers, scenes, captions and their verifier."""
