"""ElevenLabs' API, for its clients: speech, music and voices."""
