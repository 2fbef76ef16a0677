"""Usage over time: hourly rollups, reports from them, and what it would have cost otherwise."""
