"""Usage reports, exports, statements and reconciliation, derived from the ledger's rows."""
