"""The contract between gateway and workers, owned by the side that computes.

It imports neither torch nor a web framework nor SQL. What crosses the wire may only grow: unknown
fields are tolerated, a new field has a default, a type never changes. Deploy workers first: an old
gateway ignores what a new worker adds, and a new gateway must not ask for what an old worker lacks.
"""
