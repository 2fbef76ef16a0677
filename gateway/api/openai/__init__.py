"""OpenAI's API, for its clients: texts, images, videos, speech, files and batches."""
