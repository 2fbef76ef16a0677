"""The speech engine gives its library's audio, at any load and every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

from tests.workers.speech.driver import RATE, Driver, samples, speak, spec
from workers.contract.jobs import (
    AUDIO_CHUNK_BYTES_MAX,
    AudioChunk,
    Cancelled,
    Completed,
    Failed,
    Progress,
)
from workers.contract.kinds import UNMARKED, sniff
from workers.contract.media import Medium, characters
from workers.engines.registry import obstacle
from workers.engines.speech.engine import SpeechEngine
from workers.engines.speech.families import FAMILIES
from workers.media.audio import AUDIO_TYPES
from workers.protocol.engine import Admitted, Wait

Checkpoint = Callable[[str], Path]
VOICES: dict[str, dict[str, Any]] = {
    "speecht5": {"ann": {"embedding": "ann.npy"}, "bob": {"embedding": "bob.npy"}},
    "vits-speakers": {"ann": {"speaker": 1}, "bob": {"speaker": 2}},
    "fastspeech2_conformer": {"ann": {"speaker": 1}, "bob": {"speaker": 2}},
}
WHOLE = ("vits", "vits-speakers", "speecht5", "fastspeech2_conformer")
FADE = 32
"""Samples at either end that fade."""
TEXT = "Hello there. I have 2 dogs, and more. Good night!"


def of(checkpoint: Checkpoint, name: str, *also: str, **options: Any) -> Any:
    return spec(checkpoint(name), "text-to-speech", *also, voices=VOICES.get(name, {}), **options)


def seeded(seed: int) -> None:
    mixed = np.random.SeedSequence((seed, 0)).generate_state(1, np.uint64)
    torch.manual_seed(int(mixed[0]))


def _vits(path: Path, text: str) -> torch.Tensor:
    model, tokenizer = t.VitsModel.from_pretrained(path), t.VitsTokenizer.from_pretrained(path)
    speaker = 1 if model.config.num_speakers > 1 else None
    seeded(7)
    return model(tokenizer(text, return_tensors="pt").input_ids, speaker_id=speaker).waveform[0]


def _speecht5(path: Path, text: str) -> torch.Tensor:
    model = t.SpeechT5ForTextToSpeech.from_pretrained(path)
    vocoder = t.SpeechT5HifiGan.from_pretrained(path / "vocoder")
    ids = t.AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids
    voice = torch.from_numpy(np.load(path / "ann.npy"))[None]
    seeded(7)
    most = 0.5 * RATE / 32 / ids.shape[1]
    return model.generate_speech(ids, voice, vocoder=vocoder, maxlenratio=min(20.0, most))


def _fastspeech(path: Path, text: str) -> torch.Tensor:
    model = t.FastSpeech2ConformerWithHifiGan.from_pretrained(path).eval()
    ids = t.AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids
    return model(ids, speaker_ids=torch.tensor([[1]])).waveform[0]


REFERENCES = {
    "vits": _vits,
    "vits-speakers": _vits,
    "speecht5": _speecht5,
    "fastspeech2_conformer": _fastspeech,
}


@pytest.mark.parametrize("name", WHOLE)
def test_sentence_equals_the_library_output(checkpoint: Checkpoint, name: str) -> None:
    found = speak(of(checkpoint, name), text="hello there, you", seed=7)

    with torch.no_grad():
        wanted = REFERENCES[name](checkpoint(name), "hello there, you").clip(-1, 1).numpy()
    assert found.shape == wanted.shape
    assert np.abs(found[FADE:-FADE] - wanted[FADE:-FADE]).max() < 1e-4
    assert np.abs(found).max() > 1e-4


@pytest.mark.parametrize("name", ["vits", "vits-speakers", "speecht5"])
def test_bfloat16_produces_the_same_audio_beside_others(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name, dtype="bfloat16"))
    alone = speak(driver, text=TEXT, seed=7)

    for number in range(2):
        driver.admit(str(number), text=TEXT, seed=7)
        driver.step()
    driver.finish()

    assert driver.engine.hardware.dtype == "bfloat16"
    assert np.abs(alone).max() > 1e-4
    for number in range(2):
        assert np.array_equal(samples(driver.file(str(number))), alone)


def test_family_that_computes_in_float32_only_says_so(checkpoint: Checkpoint) -> None:
    name = "fastspeech2_conformer"
    engine = SpeechEngine(of(checkpoint, name, dtype="bfloat16"))

    with pytest.raises(ValueError, match="dtype is 'bfloat16'; this family computes in float32"):
        engine.load()

    driver = Driver(of(checkpoint, name, dtype="auto"))
    assert driver.engine.hardware.dtype == "float32"


@pytest.mark.parametrize("name", WHOLE)
def test_concurrent_requests_do_not_change_the_audio(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    texts = [TEXT, "Good night!", "Hello."]
    alone = [speak(driver, text=text, seed=seed) for seed, text in enumerate(texts)]

    for seed, text in enumerate(texts):
        driver.admit(f"together-{seed}", text=text, seed=seed, stream=seed == 1)
        driver.step()
    driver.finish()

    for seed, wanted in enumerate(alone):
        assert np.array_equal(samples(driver.file(f"together-{seed}")), wanted)


@pytest.mark.parametrize("name", ["vits", "speecht5"])
def test_audio_depends_on_the_seed(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))

    first, again, other = (speak(driver, seed=seed) for seed in (1, 1, 2))

    assert np.array_equal(first, again)
    assert first.shape != other.shape or not np.array_equal(first, other)


@pytest.mark.parametrize("format", AUDIO_TYPES)
def test_stream_is_a_valid_file_and_reproducible(checkpoint: Checkpoint, format: str) -> None:
    driver = Driver(of(checkpoint, "vits"))

    streams = []
    for _ in range(2):
        driver.admit("first", text=TEXT, format=format, stream=True, seed=5)
        driver.finish()
        streams.append(driver.streamed("first"))

    stream = streams[0]
    assert stream == streams[1]
    kind = AUDIO_TYPES[format]  # type: ignore[index]
    assert kind in UNMARKED or sniff(stream[:64]) == kind
    said = [event for event in driver.events["first"] if isinstance(event, AudioChunk)]
    assert max(len(event.data) for event in said) <= AUDIO_CHUNK_BYTES_MAX
    outcome = driver.outcomes["first"]
    assert isinstance(outcome, Completed)
    assert said[-1].duration_ms == outcome.usage.audio_ms
    if format == "wav":
        assert np.array_equal(samples(stream), samples(driver.file("first")))


def test_unstreamed_audio_is_timed_too(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "vits"))

    driver.admit("a", text=TEXT)
    driver.finish()

    said = [event for event in driver.events["a"] if isinstance(event, AudioChunk)]
    assert said
    assert driver.streamed("a") == b""


def test_audio_is_emitted_before_the_last_sentence_is_synthesised(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "vits"))
    driver.admit("a", text=TEXT, format="pcm", stream=True)

    driver.step()

    first = len(driver.streamed("a"))
    assert first > 0
    assert driver.events["a"][-1] == Progress(1, 3)
    driver.finish()
    assert len(driver.streamed("a")) > first


def test_outcome_describes_the_audio(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "vits"))
    text = "Cafe\u0301! Twice."

    driver.admit("a", text=text, seed=3)
    driver.finish()

    outcome = driver.outcomes["a"]
    assert isinstance(outcome, Completed)
    found = samples(outcome.files[0].data)
    milliseconds = round(len(found) * 1000 / RATE)
    assert outcome.usage.characters == characters(text) == 12
    assert outcome.usage.audio_ms == milliseconds
    assert outcome.output["media"] == [
        Medium(
            "audio",
            blob=0,
            content_type="audio/wav",
            duration_ms=milliseconds,
            sample_rate=RATE,
            seed=3,
        )
    ]


def test_sentences_are_joined_with_a_pause_and_without_a_click(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "vits", pause_ms=250))

    whole = speak(driver, text="Hello. Good night.", seed=1)

    first = speak(driver, text="Hello.", seed=1)
    assert np.array_equal(whole[: len(first)], first)
    pause = whole[len(first) : len(first) + RATE // 4]
    assert not pause.any()
    assert abs(whole[0]) <= 1 / FADE
    assert abs(whole[len(first) - 1]) <= 1 / FADE


@pytest.mark.parametrize("name", ["vits", "fastspeech2_conformer"])
def test_every_model_applies_the_speed(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))
    text = "good night to all of you who are still awake"

    slow, plain, fast = (len(speak(driver, text=text, speed=speed)) for speed in (0.5, 1, 2))

    assert slow > 1.3 * plain > 1.3 * fast


@pytest.mark.parametrize("name", ["vits-speakers", "speecht5", "fastspeech2_conformer"])
def test_a_voice_is_chosen_by_its_name(checkpoint: Checkpoint, name: str) -> None:
    driver = Driver(of(checkpoint, name))

    ann, bob, left_open = (speak(driver, voice=voice) for voice in ("ann", "bob", ""))

    assert np.array_equal(ann, left_open)
    assert ann.shape != bob.shape or not np.array_equal(ann, bob)


def test_output_has_the_requested_sample_rate(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "vits"))

    found = [speak(driver, sample_rate=rate) for rate in (None, 16_000)]

    assert len(found[1]) == pytest.approx(2 * len(found[0]), abs=2)


def test_a_cancel_takes_effect_at_the_next_step(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "speecht5"))
    driver.admit("gone", text=TEXT)
    driver.admit("stays", text="Hello.")
    while not any(isinstance(event, AudioChunk) for event in driver.events["gone"]):
        driver.step()
    driver.admit("unheard", text=TEXT)
    driver.step()

    driver.engine.cancel("gone", "client")  # type: ignore[arg-type]
    driver.engine.cancel("unheard", "client")  # type: ignore[arg-type]
    driver.step()

    outcome, nothing = driver.outcomes["gone"], driver.outcomes["unheard"]
    assert isinstance(outcome, Cancelled)
    assert isinstance(nothing, Cancelled)
    assert 0 < outcome.usage.characters < len(TEXT)
    assert nothing.usage.characters == 0
    driver.finish()
    assert isinstance(driver.outcomes["stays"], Completed)


def test_a_short_request_does_not_wait_for_a_long_one(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "speecht5"))
    driver.admit("long", text=TEXT * 5)
    driver.step()
    driver.admit("short", text="Hello.")

    while "short" not in driver.outcomes:
        driver.step()

    assert "long" in driver.open
    assert driver.shares["long"] == pytest.approx(driver.shares["short"], abs=3)
    driver.engine.cancel("long", "client")  # type: ignore[arg-type]
    driver.finish()


def test_number_of_running_requests_is_limited_by_slots(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "vits", slots=1))

    assert driver.admit("a") == Admitted()
    assert driver.admit("b") == Wait()
    driver.finish()
    assert driver.admit("b") == Admitted()
    driver.finish()


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"text": ""}, "text", "nothing that can be pronounced"),
        ({"text": "... !"}, "text", "nothing that can be pronounced"),
        ({"voice": "eve"}, "voice", "ann, bob"),
        ({"language": "de"}, "language", "it supports en"),
        ({"language": "nonsense!"}, "language", "accepted are en"),
        ({"speed": 9}, "speed", "0.25 to 4"),
        ({"instructions": "whisper"}, "instructions", "does not support instructions"),
        ({"sample_rate": 100}, "sample_rate", "8000 to 48000"),
        ({"parameters": {"top_k": 3}}, "top_k", "no parameter top_k"),
        ({"files": [b"RIFF"]}, "recording", "does not support voices from recordings"),
        ({"format": "midi"}, None, "is not valid"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    checkpoint: Checkpoint, asked: dict[str, Any], param: str | None, said: str
) -> None:
    driver = Driver(of(checkpoint, "vits-speakers"))

    refused = driver.admit("a", **asked)

    assert isinstance(refused, Failed)
    assert said in refused.message
    assert refused.param == param


def test_text_in_an_unsupported_script_is_a_client_error(
    checkpoint: Checkpoint,
) -> None:
    driver = Driver(of(checkpoint, "vits"))
    driver.admit("a", text="привет")
    driver.finish()

    outcome = driver.outcomes["a"]

    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.param) == ("invalid_input", "text")


def test_a_regional_tag_is_the_same_language(checkpoint: Checkpoint) -> None:
    assert len(speak(of(checkpoint, "vits"), language="en-GB"))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("vits", {"voices": {"x": {"speaker": 1}}}, "speaker 1 of 1"),
        ("vits", {"voices": {"x": {"embedding": "no.npy"}}}, "'x' cannot be read"),
        ("vits-speakers", {"voices": {"x": {"speaker": 3}}}, "speaker 3 of 3"),
        ("speecht5", {"voices": {}}, "needs voices"),
        ("speecht5", {"voices": {"x": {"speaker": 1}}}, "accepts embedding"),
        ("speecht5", {"vocoder": "elsewhere"}, "no vocoder"),
    ],
)
def test_invalid_entry_is_not_loaded(
    checkpoint: Checkpoint, name: str, options: dict[str, Any], said: str
) -> None:
    engine = SpeechEngine(spec(checkpoint(name), **({"voices": VOICES.get(name, {})} | options)))

    with pytest.raises(ValueError, match=said):
        engine.load()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("slots", 0, "at least 1"),
        ("languages", [], "needs at least one"),
        ("languages", ["klingon?"], "unknown language"),
        ("pause_ms", -1, "at least 0"),
        ("sentence_seconds", 0, "must be positive"),
        ("voice", "ann", "options of the engine speech are"),
        ("dtype", "float16", "float16"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        SpeechEngine(spec(tmp_path, **{option: value}))


def test_unsupported_model_type_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xtts"}))
    unknown = SpeechEngine(spec(tmp_path))
    with pytest.raises(ValueError, match="unsupported model type 'xtts'; supported types are vits"):
        unknown.load()

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vits"}))
    with pytest.raises(ValueError, match="vits does not support voice-clone"):
        SpeechEngine(spec(tmp_path, "voice-clone")).load()


def test_an_engine_can_be_loaded_again(checkpoint: Checkpoint) -> None:
    driver = Driver(of(checkpoint, "vits"))
    first = speak(driver, seed=1)

    driver.engine.unload()
    driver.engine.load()

    assert np.array_equal(speak(driver, seed=1), first)


def test_its_packages_are_installed(tmp_path: Path) -> None:
    assert obstacle(spec(tmp_path)) is None
    assert FAMILIES
