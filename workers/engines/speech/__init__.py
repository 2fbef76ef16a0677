"""Speech and music by checkpoints of others, sentence by sentence, heard while it is made."""
