"""Code of the engine process: step loop, fairness, metering and background work."""
