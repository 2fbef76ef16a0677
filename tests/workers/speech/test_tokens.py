"""Families with codec tokens: the library's own ``generate``, streamed before it ends."""

from __future__ import annotations

import io
import itertools
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers as t

from tests.workers.speech.driver import RATE, Driver, samples, speak, spec
from workers.contract.jobs import AudioChunk, Cancelled, Completed, Failed, Usage
from workers.engines.noise import gumbel, key_of
from workers.engines.speech.engine import SpeechEngine
from workers.protocol.engine import Admitted

Checkpoint = Callable[[str], Path]
STREAMED = ("csm", "musicgen", "dia")
"""Within a sentence."""
FAMILIES = (*STREAMED, "bark")
CLONED = ("csm", "dia")
SECONDS = {"csm": 2.5, "musicgen": 0.5, "dia": 0.5, "bark": 0.5}
RATES = {"csm": 24_000}
TEXT = "hello there, you"


def of(checkpoint: Checkpoint, name: str, **options: Any) -> Any:
    also = ("voice-clone",) if name in CLONED else ()
    given = {"sentence_seconds": SECONDS.get(name, 0.5), "seconds": 0.5, **options}
    return spec(checkpoint(name), _task(name), *also, **given)


def _task(name: str) -> str:
    return "text-to-music" if name.startswith("musicgen") else "text-to-speech"


def asked(name: str, text: str, **others: Any) -> dict[str, Any]:
    return {"prompt" if _task(name) == "text-to-music" else "text": text, **others}


def close(found: np.ndarray, wanted: torch.Tensor, rate: int = RATE) -> bool:
    """Whether two are equal but for the ends, that fade."""
    fade, other = rate // 250, wanted.clip(-1, 1).numpy()
    return found.shape == other.shape and np.abs(found - other)[fade:-fade].max() < 1e-4


def mixed(seed: int) -> int:
    """Of the first sentence."""
    return int(np.random.SeedSequence((seed, 0)).generate_state(1, np.uint64)[0])


@contextmanager
def noised(seed: int, *, codebooks: int = 0) -> Iterator[None]:
    """Let the library sample with the noise of the engine.

    ``codebooks``: how many calls make a frame, if the library samples its tokens one by one.
    """
    calls = itertools.count()

    def sample(chances: torch.Tensor, num_samples: int) -> torch.Tensor:
        step, codebook = divmod(next(calls), codebooks or 1)
        count, size = chances.shape
        tokens = torch.arange(count * size, dtype=torch.int32) + codebook * size
        keys = torch.tensor([key_of(mixed(seed), step)], dtype=torch.int32)
        noise = gumbel(keys, tokens).view(count, size)
        return (chances.log() + noise).argmax(-1, keepdim=True)

    with mock.patch("torch.multinomial", sample):
        yield


def recording(rate: int, seconds: float = 0.4) -> tuple[bytes, np.ndarray]:
    """Return a recording of speech as a WAV, and its samples."""
    noise = np.random.RandomState(5).randn(int(rate * seconds)) * 3_000
    words = noise.astype("<i2")
    with (out := io.BytesIO()), wave.open(out, "wb") as file:
        file.setparams((1, 2, rate, len(words), "NONE", ""))
        file.writeframes(words.tobytes())
        file.close()
        return out.getvalue(), words.astype(np.float32) / 32_768


def _csm(path: Path, text: str, voice: np.ndarray | None, seconds: float) -> torch.Tensor:
    model = t.CsmForConditionalGeneration.from_pretrained(path).eval()
    processor = t.CsmProcessor.from_pretrained(path)
    said: list[Any] = [{"role": "0", "content": [{"type": "text", "text": text}]}]
    if voice is not None:
        heard = [{"type": "text", "text": "what i say"}, {"type": "audio", "audio": voice}]
        said.insert(0, {"role": "0", "content": heard})
    inputs = processor.apply_chat_template(said, tokenize=True, return_dict=True)
    model.depth_decoder.generation_config.do_sample = True  # which the library does not read
    with noised(7, codebooks=4):
        return model.generate(**inputs, output_audio=True, max_new_tokens=int(seconds * 12.5))[0]


def _musicgen(path: Path, text: str, voice: np.ndarray | None, seconds: float) -> torch.Tensor:
    model = t.MusicgenForConditionalGeneration.from_pretrained(path).eval()
    inputs = t.AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")
    frames = round(seconds * RATE / 32)
    with noised(7):
        return model.generate(**inputs, max_new_tokens=frames + 3)[0, 0]


def _bark(path: Path, text: str, voice: np.ndarray | None, seconds: float) -> torch.Tensor:
    model = t.BarkModel.from_pretrained(path).eval()
    processor = t.BarkProcessor(t.AutoTokenizer.from_pretrained(path))
    preset = None if voice is None else dict(np.load(path / "ann.npz"))
    inputs = processor(text, voice_preset=preset, max_length=40)
    torch.manual_seed(mixed(7))
    return model.generate(**inputs, semantic_max_new_tokens=48)[0]


def _dia(path: Path, text: str, voice: np.ndarray | None, seconds: float) -> torch.Tensor:
    model = t.DiaForConditionalGeneration.from_pretrained(path).eval()
    processor = t.DiaProcessor(
        t.DiaFeatureExtractor.from_pretrained(path),
        t.DiaTokenizer.from_pretrained(path),
        t.DacModel.from_pretrained(path / "vocoder").eval(),
    )
    text = f"[S1] {text}" if voice is None else f"[S1] what i say [S1] {text}"
    special: dict[str, Any] = {"bos_token_id": 18, "pad_token_id": 17}
    special |= {"eos_token_id": 16, "delay_pattern": [0, 2, 3, 4]}
    inputs = processor(text=[text], audio=voice, sampling_rate=RATE, truncation=True, **special)
    length = inputs["decoder_attention_mask"].shape[1] - 4
    frames = round(seconds * RATE / 32)
    with noised(7):
        made = model.generate(**inputs, max_new_tokens=frames + 5)
    return processor.decode(made, audio_prompt_len=None if voice is None else length, **special)


REFERENCES = {"csm": _csm, "musicgen": _musicgen, "bark": _bark, "dia": _dia}


@pytest.mark.parametrize("name", FAMILIES)
def test_sentence_equals_the_library_output(checkpoint: Checkpoint, name: str) -> None:
    found = speak(of(checkpoint, name), **asked(name, TEXT, seed=7))

    wanted = REFERENCES[name](checkpoint(name), TEXT, None, SECONDS[name])
    assert close(found, wanted, RATES.get(name, RATE))
    assert np.abs(found).max() > 1e-4


@pytest.mark.parametrize("name", CLONED)
def test_cloned_voice_equals_the_library_output(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    assert driver.engine._loaded is not None
    file, voice = recording(driver.engine._loaded.recording_rate or 0)

    cloned = {"task": "voice-clone", "transcript": "what i say", "files": [file]}
    found = speak(driver, text=TEXT, seed=7, **cloned)

    wanted = REFERENCES[name](checkpoint(name), TEXT, voice, SECONDS[name])
    assert close(found, wanted, RATES.get(name, RATE))


@pytest.mark.parametrize("preset", ["ann.npz", "v2/bob"])
def test_preset_equals_the_library_output(checkpoint: Checkpoint, preset: str) -> None:
    path = checkpoint("bark")
    driver = Driver(of(checkpoint, "bark", voices={"x": {"preset": preset}}))

    found = speak(driver, text=TEXT, seed=7)

    assert close(found, _bark(path, TEXT, np.zeros(1), 0)) == (preset == "ann.npz")


@pytest.mark.parametrize("name", FAMILIES)
def test_concurrent_requests_do_not_change_the_audio(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    wishes = [asked(name, text, seed=seed) for text, seed in ((TEXT, 7), ("yes", 1), (TEXT, 2))]
    alone = [speak(driver, **one) for one in wishes]

    driver.admit("0", **wishes[0])
    driver.step()
    for place in (1, 2):
        driver.admit(str(place), **wishes[place])
    driver.finish()

    for place, wanted in enumerate(alone):
        assert np.array_equal(samples(driver.file(str(place))), wanted)


@pytest.mark.parametrize("name", STREAMED)
def test_audio_is_emitted_within_a_sentence_and_equals_the_whole(
    checkpoint: Checkpoint, name: str
) -> None:
    seconds = 3 * SECONDS[name]
    driver = Driver(of(checkpoint, name, sentence_seconds=seconds, seconds=seconds))
    driver.admit("a", **asked(name, TEXT), seed=7, stream=True)

    heard: list[int] = []
    while driver.open:
        driver.step()
        heard.append(sum(isinstance(event, AudioChunk) for event in driver.events["a"]))

    assert heard[len(heard) * 3 // 4] > 0
    assert len(set(heard)) > 3
    assert np.array_equal(samples(driver.streamed("a")), samples(driver.file("a")))


@pytest.mark.parametrize("name", FAMILIES)
def test_audio_depends_on_the_seed(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))

    first, again, other = (speak(driver, **asked(name, TEXT, seed=seed)) for seed in (1, 1, 2))

    assert np.array_equal(first, again)
    assert first.shape != other.shape or not np.array_equal(first, other)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_produces_audio(checkpoint: Checkpoint, name: str) -> None:
    assert np.abs(speak(of(checkpoint, name, dtype="bfloat16"), **asked(name, TEXT))).max() > 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cancel_takes_effect_at_the_next_step(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    driver.admit("gone", **asked(name, TEXT))
    for _ in range(4):
        driver.step()

    driver.engine.cancel("gone", "client")  # type: ignore[arg-type]
    driver.step()

    outcome = driver.outcomes["gone"]
    assert isinstance(outcome, Cancelled)
    assert driver.engine._batcher._suspended == []
    assert len(speak(driver, **asked(name, TEXT)))


@pytest.mark.parametrize("name", FAMILIES)
def test_audio_never_exceeds_the_hold(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    wish = asked(name, f"{TEXT}. {TEXT}.", seed=3)
    whole = speak(driver, **wish)
    most = len(whole) * 500 // RATES.get(name, RATE)

    admitted = driver.admit("a", **wish, limits=Usage(audio_ms=most))

    assert admitted == Admitted()
    driver.finish()
    outcome = driver.outcomes["a"]
    assert isinstance(outcome, Completed)
    assert outcome.usage.audio_ms == most
    found = samples(driver.file("a"))
    assert np.array_equal(found, whole[: len(found)])


def test_recording_that_fills_the_context_is_refused(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "dia"))
    file = recording(RATE, 3.1)[0]

    refused = driver.admit("a", task="voice-clone", transcript="what i say", files=[file])

    assert isinstance(refused, Failed)
    assert "no room" in refused.message


def test_too_short_a_recording_is_refused(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "dia"))
    file = recording(RATE, 0.2)[0]

    refused = driver.admit("a", task="voice-clone", transcript="what i say", files=[file])

    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == ("invalid_input", "recording")
    assert "0.20 seconds long; it must be at least 0.3" in refused.message


def test_recording_needs_a_transcript(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "csm"))

    refused = driver.admit("a", task="voice-clone", files=[recording(24_000)[0]])

    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == ("invalid_input", "recording")
    assert "transcript" in refused.message


@pytest.mark.parametrize(
    ("name", "voice", "said"),
    [
        ("csm", {"embedding": "no.npy"}, "cannot be read"),
        ("csm", {"recording": "a.wav"}, "needs the transcript"),
        ("dia", {"speaker": 1}, "accepts recording"),
        ("musicgen", {"speaker": 1}, "accepts no voices"),
        ("musicgen-stereo", {}, "2 channels"),
        ("bark", {"preset": "nobody"}, "'x' cannot be read"),
        ("bark", {"preset": "broken.npz"}, "tokens outside 0 to 15"),
        ("bark", {"preset": "part.npz"}, "lacks coarse_prompt"),
    ],
)
def test_invalid_entry_is_not_loaded(
    checkpoint: Checkpoint, name: str, voice: dict[str, Any], said: str
) -> None:
    (checkpoint(name) / "a.wav").write_bytes(recording(24_000)[0])
    engine = SpeechEngine(of(checkpoint, name, voices={"x": voice} if voice else {}))

    with pytest.raises(ValueError, match=said):
        engine.load()
