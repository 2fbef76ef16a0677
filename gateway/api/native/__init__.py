"""Tollgate's own API: requests of every task, receipts, usage, limits, uploads and webhooks."""
