"""What pages show, as plain values for templates. Pure: no HTTP, no SQL."""
