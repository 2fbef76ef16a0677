"""Pages about what runs: workers, queues, upstreams and gateways."""
