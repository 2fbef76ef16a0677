"""Models served over HTTP by other services.

They use no device and no step loop: their jobs run as tasks of the agent, with the same leases,
cancellations, deadlines and outcomes as all jobs (``docs/decisions.md``, 1). Torch is not needed.
"""
