"""Transcription by encoder-decoder models: windows of many recordings share each decoder step."""
