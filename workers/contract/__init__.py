"""The contract between gateway and workers, owned by the side that computes.

Imports neither torch nor a web framework nor SQL. Messages may only grow: unknown fields are
ignored, a new field has a default, a type never changes. Deploy workers before gateways: an old
gateway ignores what a new worker adds, but a new gateway must not use what an old worker lacks.
"""
