"""Pictures and clips between bytes and pixels: what clients send, and what they get back."""
