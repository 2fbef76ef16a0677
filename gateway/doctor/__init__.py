"""``tollgate doctor``: examines a machine and an installation, whether or not it runs."""
