"""Texts, segments and times equal those of the library's ``generate``, whatever else is decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.workers.driving import EngineDriver
from tests.workers.transcription.checkpoints import POSITIONS, RATE, make_checkpoint, sound, wav
from workers.contract.jobs import (
    Cancelled,
    Completed,
    Failed,
    Job,
    RequestId,
    Tokens,
    Usage,
)
from workers.contract.media import Transcript
from workers.contract.models import ModelSpec
from workers.engines.transcription.engine import TranscriptionEngine
from workers.engines.transcription.words import align, to_words, token_times
from workers.media.recordings import read_audio
from workers.protocol.engine import Wait

LONG = wav(sound(7.3, 3))
SHORT = wav(sound(1.5, 4))
WHOLE = wav(sound(2.0, 5))


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("timed"), seed=7)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), seed=7, timestamps=False)


def _driver(path: Path, **options: Any) -> EngineDriver[TranscriptionEngine]:
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, **options}
    spec = ModelSpec(
        "tiny", "speech-to-text", engine="transcription", checkpoint=str(path), options=settings
    )
    return EngineDriver(TranscriptionEngine(spec))


def _job(name: str, *, held_ms: int = 0, **given: Any) -> Job:
    return Job(
        RequestId(name),
        "1",
        "tiny",
        "speech-to-text",
        {"language": "de", **given},
        limits=Usage(requests=1, audio_ms=held_ms),
        stream=True,
    )


def _run(driver: EngineDriver[TranscriptionEngine], *names: str) -> None:
    for _ in range(3000):
        if all(name in driver.outcomes for name in names):
            return
        driver.step()
    raise AssertionError("the requests did not end")


def _transcribe(path: Path, data: bytes, **given: Any) -> tuple[str, Transcript]:
    driver = _driver(path)
    driver.take(_job("one", **given), [data])
    _run(driver, "one")
    return _result(driver, "one")


def _result(driver: EngineDriver[TranscriptionEngine], name: str) -> tuple[str, Transcript]:
    outcome = driver.outcomes[name]
    assert isinstance(outcome, Completed), outcome
    (choice,) = outcome.output["choices"]
    return choice["text"], msgspec.convert(outcome.output["transcript"], Transcript)


def _expected(path: Path, data: bytes, **settings: Any) -> tuple[Any, list[int]]:
    """Return what ``generate`` returns, and the ids of its text."""
    model: Any = WhisperForConditionalGeneration.from_pretrained(path).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    samples = read_audio(data, rate=RATE, seconds_max=60).samples[0]
    is_short = len(samples) <= extractor.n_samples
    features = extractor(
        samples,
        sampling_rate=RATE,
        return_tensors="pt",
        truncation=False,
        padding="max_length" if is_short else "longest",
    ).input_features
    with torch.inference_mode():
        found = model.generate(features, return_segments=True, **settings)
    end = model.generation_config.eos_token_id
    segments = found["segments"][0]
    return found, [id for one in segments for id in one["tokens"].tolist() if id < end]


def _ids(path: Path, transcript: Transcript) -> list[int]:
    end = AutoTokenizer.from_pretrained(path).eos_token_id
    return [id for one in transcript.segments for id in one.tokens if id < end]


@pytest.mark.parametrize("data", [LONG, WHOLE], ids=["long", "one window"])
def test_segments_equal_those_of_the_library(data: bytes, timed: Path) -> None:
    text, found = _transcribe(timed, data, timestamps=["segment"])

    expected, ids = _expected(timed, data, language="de", task="transcribe", return_timestamps=True)
    assert _ids(timed, found) == ids
    assert text == AutoTokenizer.from_pretrained(timed).decode(ids).lstrip()
    theirs = [
        (round(float(one["start"]) * 1000), round(float(one["end"]) * 1000))
        for one in expected["segments"][0]
    ]
    most = found.duration_ms
    assert [(one.start_ms, one.end_ms) for one in found.segments] == [
        (min(start, most), min(end, most)) for start, end in theirs
    ]
    assert "".join(one.text for one in found.segments).lstrip() == text


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, {"language": "de", "task": "transcribe"}),
        ({"language": "German"}, {"language": "de", "task": "transcribe"}),
        ({"translate": True, "language": "fr-CA"}, {"language": "fr", "task": "translate"}),
        ({"language": ""}, {"task": "transcribe"}),
        ({"prompt": "the lazy fox"}, {"language": "de", "task": "transcribe", "prompt": True}),
    ],
    ids=["language", "name", "translation", "detected", "prompt"],
)
def test_text_of_a_short_recording_equals_that_of_the_library(
    given: dict[str, Any], settings: dict[str, Any], plain: Path
) -> None:
    text, found = _transcribe(plain, SHORT, **given)

    if settings.pop("prompt", False):
        tokenizer = AutoTokenizer.from_pretrained(plain)
        ids = tokenizer.encode(" the lazy fox", add_special_tokens=False)
        first = tokenizer.convert_tokens_to_ids("<|startofprev|>")
        settings["prompt_ids"] = torch.tensor([first, *ids])
    _, ids = _expected(plain, SHORT, **settings)
    assert _ids(plain, found) == ids
    assert text == AutoTokenizer.from_pretrained(plain).decode(ids).lstrip()
    assert found.language in ("german", "french", "english")


def test_requests_do_not_depend_on_each_other_and_start_while_others_run(timed: Path) -> None:
    files = {"a": LONG, "b": SHORT, "c": WHOLE, "d": wav(sound(5.1, 9))}
    alone = {name: _transcribe(timed, data, timestamps=["word"]) for name, data in files.items()}
    driver = _driver(timed, slots=3)

    for name in ("a", "b", "c"):
        driver.take(_job(name, timestamps=["word"]), [files[name]])
        driver.step()
    assert isinstance(driver.take(_job("d"), [files["d"]]), Wait)
    _run(driver, "b", "c")
    driver.take(_job("d", timestamps=["word"]), [files["d"]])
    _run(driver, *files)

    for name, expected in alone.items():
        found = _result(driver, name)
        assert found[0] == expected[0]
        assert [one.tokens for one in found[1].segments] == [
            one.tokens for one in expected[1].segments
        ]
        assert found[1].words == expected[1].words
        emitted = [event for event in driver.events[name] if isinstance(event, Tokens)]
        assert "".join(event.text for event in emitted) == found[0]
        assert [event.finish_reason for event in emitted][-1] == "stop"
    assert driver.outcomes["a"].usage.audio_ms == 7300
    assert driver.engine._model.network.rows == 0


def test_a_step_decodes_a_token_of_every_window(plain: Path, whole_calls: None) -> None:
    together = _driver(plain, encode_rows=4)
    for name in "abcd":
        together.take(_job(name), [SHORT])
    _run(together, *"abcd")
    alone = _driver(plain)
    alone.take(_job("a"), [SHORT])
    _run(alone, "a")

    assert together.steps == alone.steps


def test_windows_are_decoded_while_others_are_encoded_layer_by_layer(
    timed: Path, single_layers: None
) -> None:
    alone = {name: _transcribe(timed, data) for name, data in (("a", LONG), ("b", WHOLE))}
    driver = _driver(timed)
    driver.take(_job("a"), [LONG])
    while not driver.engine._rows:
        driver.step()
    (request,) = driver.engine._rows
    window = request.window
    assert window is not None
    driver.take(_job("b"), [WHOLE])

    decoded = []
    while len(driver.engine._rows) == 1:
        decoded.append(len(window.tokens))
        driver.step()
    _run(driver, "a", "b")

    # One pause before each layer of both parts, and the tokens go on meanwhile.
    assert decoded == list(range(decoded[0], decoded[0] + len(decoded)))
    assert len(decoded) > 2
    for name, (text, transcript) in alone.items():
        found = _result(driver, name)
        assert found[0] == text
        assert [one.tokens for one in found[1].segments] == [
            one.tokens for one in transcript.segments
        ]


def test_encoding_ends_with_the_last_request_that_waits_for_it(
    timed: Path, single_layers: None
) -> None:
    driver = _driver(timed)
    for name in "ab":
        driver.take(_job(name), [SHORT])
    driver.step()
    engine = driver.engine
    assert engine._encoding is not None

    engine.cancel(RequestId("a"), "client")
    driver.step()
    assert isinstance(driver.outcomes["a"], Cancelled)
    assert engine._encoding is not None
    while engine._encoding is not None:
        driver.step()
    assert engine._model.network.rows == len(engine._rows) == 1
    _run(driver, "b")
    assert isinstance(driver.outcomes["b"], Completed)

    driver.take(_job("c"), [SHORT])
    driver.step()
    engine.cancel(RequestId("c"), "client")
    driver.step()
    assert isinstance(driver.outcomes["c"], Cancelled)
    assert engine._encoding is None
    assert engine._model.network.rows == 0


def test_token_times_equal_those_of_the_library(timed: Path) -> None:
    expected, _ = _expected(
        timed,
        WHOLE,
        language="de",
        task="transcribe",
        return_timestamps=True,
        return_token_timestamps=True,
        num_frames=torch.tensor([2 * POSITIONS]),
    )
    first = expected["segments"][0][0]
    whole = first["result"]["sequences"].tolist()
    start = len(whole) - len(first["result"]["token_timestamps"])
    engine = _driver(timed).engine
    transcriber = engine._model
    audio = read_audio(WHOLE, rate=RATE, seconds_max=9)

    with torch.inference_mode():
        encoded = transcriber.network.encode([transcriber.features(audio)[0]])
        row = transcriber.network.add_row(encoded, 0)
        prefix = transcriber.special.prefix("de", "transcribe", timestamps=True)
        tokens = whole[len(prefix) if whole[0] == prefix[0] else 0 :]
        # The library does not run the last token, which is the end or one too many.
        tokens = tokens[:-1]
        heads = transcriber.special.alignment_heads
        attention = transcriber.network.attend(row, [*prefix, *tokens], heads)
        times = token_times(attention[:, len(prefix) :], POSITIONS, 3)

    theirs = first["result"]["token_timestamps"].tolist()[start + len(prefix) :]
    assert len(set(times)) > 3
    assert times == pytest.approx(theirs[: len(times)], abs=0.001)


def test_words_are_grouped_with_their_punctuation() -> None:
    pieces = [" Hel", "lo", ",", " world", "."]
    times = [0.0, 0.2, 0.3, 0.5, 0.9]

    words = to_words(range(5), times, 1.2, lambda ids: "".join(pieces[id] for id in ids))

    assert [(word.text, word.start_s, word.end_s) for word in words] == [
        ("Hello,", 0.0, 0.5),
        ("world.", 0.5, 1.2),
    ]


def test_path_through_a_matrix_is_the_cheapest() -> None:
    costs = np.ones((3, 5))
    for row, column in [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)]:
        costs[row, column] = 0

    rows, columns = align(costs)

    assert list(zip(rows, columns, strict=True)) == [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)]


def test_a_request_is_cancelled_within_a_step_and_counts_what_was_emitted(timed: Path) -> None:
    driver = _driver(timed)
    driver.take(_job("one", timestamps=["segment"]), [LONG])
    while not driver.events["one"]:
        driver.step()

    driver.engine.cancel(RequestId("one"), "client")
    driver.step()

    outcome = driver.outcomes["one"]
    assert isinstance(outcome, Cancelled)
    assert 0 < outcome.usage.audio_ms <= 2000
    assert driver.engine._model.network.rows == 0


def test_temperature_samples_the_same_text_for_the_same_seed(plain: Path) -> None:
    texts = [_transcribe(plain, SHORT, temperature=1.0, seed=seed)[0] for seed in (1, 1, 2, 3)]

    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("given", "data", "code", "param"),
    [
        ({"language": "xx"}, SHORT, "unsupported_parameter", "language"),
        ({}, b"RIFF", "invalid_input", "audio"),
        ({"held_ms": 1000}, LONG, "invalid_input", "audio"),
    ],
)
def test_input_that_cannot_be_transcribed_fails_and_is_named(
    given: dict[str, Any], data: bytes, code: str, param: str, timed: Path
) -> None:
    failed = _driver(timed).take(_job("one", **given), [data])

    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == (code, param)


def test_a_model_without_aligned_heads_refuses_times_of_words(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny")
    config = path / "generation_config.json"
    settings = msgspec.json.decode(config.read_bytes())
    del settings["alignment_heads"]
    config.write_bytes(msgspec.json.encode(settings))

    failed = _driver(path).take(_job("one", timestamps=["word"]), [SHORT])

    assert isinstance(failed, Failed)
    assert failed.code == "unsupported_parameter"
    assert "segments" in failed.message


def test_a_checkpoint_that_lacks_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny")
    (path / "preprocessor_config.json").unlink()
    spec = ModelSpec("tiny", "speech-to-text", engine="transcription", checkpoint=str(path))

    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        TranscriptionEngine(spec).inspect()


def test_bfloat16_transcribes_alike_alone_and_beside_others(timed: Path) -> None:
    alone = []
    for data in (LONG, SHORT):
        driver = _driver(timed, dtype="bfloat16")
        driver.take(_job("one", timestamps=["segment"]), [data])
        _run(driver, "one")
        alone.append(_result(driver, "one")[0])
    driver = _driver(timed, dtype="bfloat16")

    for name, data in (("long", LONG), ("short", SHORT)):
        driver.take(_job(name, timestamps=["segment"]), [data])
    _run(driver, "long", "short")

    assert driver.engine.hardware.dtype == "bfloat16"
    assert all(alone)
    assert [_result(driver, name)[0] for name in ("long", "short")] == alone
