"""The gateway: answers HTTP and keeps the money; it never computes and never imports torch."""
