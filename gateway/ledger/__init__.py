"""The ledger: holds, receipts and transfers; every movement of money goes through here."""
