"""What ``tollgate up`` runs on one machine: its processes, their environment and their home."""
