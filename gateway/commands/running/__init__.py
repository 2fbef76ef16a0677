"""Commands about what runs: workers, queues and gateways."""
