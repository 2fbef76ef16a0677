"""Webhooks: deliveries in SQL, and the loop that sends them."""
