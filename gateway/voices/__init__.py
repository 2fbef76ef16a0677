"""Voices of accounts: recordings to speak in, and the consents that they were made with."""
