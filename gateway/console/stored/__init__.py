"""What an account stores and sends: webhooks, batches, files, voices; and who may look into it."""
