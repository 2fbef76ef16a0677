"""Usage reports, exports, statements and audits, derived from the ledger's rows."""
