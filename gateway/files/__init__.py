"""Clients' files and request attachments: fetching, storage, quotas, retention and signed URLs."""
