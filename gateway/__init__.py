"""The gateway: serves HTTP and keeps the ledger; it never runs models and never imports torch."""
