"""What runs inside an engine process: the step loop, its fairness, metering and background work."""
