"""The engines: one folder per kind of model, all behind one protocol (``protocol/engine``).

An engine owns its tensors and decides which of its requests share a step. It knows no queue, lease,
clock or price. ``workers/runtime/step_loop.py`` drives it from a single thread.
"""
