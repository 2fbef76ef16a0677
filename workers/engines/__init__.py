"""The engines: one folder per model family, all behind the same five verbs.

An engine owns its tensors and decides which of its requests share a step; it knows no queue, no
lease, no clock and no price. ``workers/runtime/step_loop.py`` drives it from a single thread.
"""
