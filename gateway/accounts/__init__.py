"""Who pays and who calls: accounts, their keys, and the limits of those."""
