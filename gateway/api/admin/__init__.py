"""What only administrators may call: accounts, keys, credit, prices, maintenance."""
