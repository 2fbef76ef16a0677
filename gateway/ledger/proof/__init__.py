"""The proof of the ledger, account by account, in pages that are read on short snapshots."""
