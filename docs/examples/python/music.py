"""Compose a short piece, as sound."""

from tollgate import run, save

piece = run("pocket-music", prompt="a calm waltz in D major at 90 bpm with piano", seconds=5)
save(piece, "waltz.mp3")
