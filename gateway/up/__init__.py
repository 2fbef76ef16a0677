"""``tollgate up``: runs everything on one machine: processes, their environment, the home."""
