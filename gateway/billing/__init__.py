"""What people ask of a bill: usage and receipts, read from the ledger and never written."""
