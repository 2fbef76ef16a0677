"""Checkpoints whose weights are stored in four or eight bits: GPTQ, AWQ, FP8, compressed-tensors.

``formats`` reads what ``config.json`` says of them, ``matrices`` the parts of a matrix, ``loading``
creates the model, and ``layers`` multiplies what is not expanded.
"""
