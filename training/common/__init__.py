"""What several trainings share: the loop, denoisers, rendered scenes, captions and their judge."""
