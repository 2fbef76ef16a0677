"""Music that is written note by note, and played by a synthesiser of ours while it is written."""
