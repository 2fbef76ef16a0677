"""Speech and music by supported checkpoints, segment by segment, streamed while synthesised."""
