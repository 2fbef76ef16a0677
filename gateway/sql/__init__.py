"""The database: connections by lane, transactions, and the classes of outages."""
