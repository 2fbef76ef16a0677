"""The contracts of the market models: what each of the vendors' models accepts."""
