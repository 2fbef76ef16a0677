"""The agent: leases jobs, hands them to engine processes or upstreams, and reports how they end."""
