"""Speak a text in the voice of a recording. Clone a voice only with its owner's consent."""

from pathlib import Path

from tollgate import data_uri, run, save

recording = Path(__file__).parents[2] / "audio" / "pocket-speech.mp3"  # or a recording of yours

speech = run(
    "pocket-speech",
    text="The receipt says what this cost.",
    recording=data_uri(recording, "audio/mpeg"),
    format="wav",
)
save(speech, "cloned.wav")
