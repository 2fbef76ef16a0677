"""Models that somebody else serves over HTTP.

They have no device, so there is no step: their jobs run as tasks of the agent, under the same
lease, cancel, deadline and outcome as every other job (``docs/decisions.md``, 1). No torch needed.
"""
