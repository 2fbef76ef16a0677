"""Portraits that speak: what a mouth does is heard in a recording and drawn into the portrait."""
