"""Music generated note by note, and rendered by our own synthesiser while it is generated."""
