"""Stored voices of accounts, and the recorded consents that they were created with."""
