"""The workers: they compute; they never see a client's key, SQL, or a price."""
