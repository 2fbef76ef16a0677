"""The database: connections by lane, transactions, and what counts as an outage."""
