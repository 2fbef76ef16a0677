"""What runs: workers, queues, upstreams and gateways, as operators see and control them."""
