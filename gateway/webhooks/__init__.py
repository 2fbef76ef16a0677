"""Webhooks: deliveries in SQL, and the sending of those that are due."""
