"""``tollgate demo``: fills a new installation with accounts, older days and real requests."""
