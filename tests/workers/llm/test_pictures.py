"""Conversations with pictures: answers, tokens, the prefix cache, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.llm.checkpoints import make_checkpoint
from tests.workers.llm.driver import Driver, choices, run_alone, texts
from tests.workers.llm.pictures import (
    FAMILIES,
    PICTURE_TOKENS,
    TEMPLATE,
    PicturedReference,
    look,
    make_pictured,
    picture,
    pictured_engine,
    pictured_spec,
)
from workers.contract.jobs import Cancelled, Completed, Failed
from workers.engines.llm.engine import LlmEngine
from workers.engines.llm.steps import launch
from workers.engines.llm.vision.pictures import Picture, PicturePrompt
from workers.protocol.engine import Admitted, Prepared

WIDE, TALL, SMALL = picture(60, 30, 1), picture(20, 90, 2), picture(9, 9, 3)
LARGE = picture(300, 200, 4)
WORDS = "the quick brown fox jumps over a lazy dog and counts to 0123456789 "
CHATS = (
    ("what is this ", WIDE),
    (TALL, "and this? ", SMALL, " the fox"),
    ("the quick fox",),
    (LARGE, LARGE, "twice"),
    (WORDS * 3, WIDE, WORDS * 2, TALL, WORDS),
    (SMALL,),
)

Made = Callable[..., Path]


@pytest.fixture(scope="session")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made: dict[str, Path] = {}

    def make(family: str = "qwen2.5vl") -> Path:
        if family not in made:
            made[family] = make_pictured(family, tmp_path_factory.mktemp("pictured"))
        return made[family]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_to_pictures_equal_those_of_generate(family: str, pictured: Made) -> None:
    path = pictured(family)
    engine, reference = pictured_engine(path), PicturedReference(path)

    for number, parts in enumerate(CHATS):
        outcome = run_alone(engine, *look(f"r{number}", *parts, account=str(number)))

        assert isinstance(outcome, Completed), outcome
        usage = outcome.usage
        found = (usage.input_tokens, usage.output_tokens, *texts(outcome))
        assert found == reference.generate(parts, 12)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": False}, {"speculation": {}}])
def test_pictures_are_read_beside_texts_and_each_other(
    options: dict[str, Any], pictured: Made
) -> None:
    path = pictured()
    driver = Driver(pictured_engine(path, slots=4, **options))
    reference = PicturedReference(path)
    waiting = list(enumerate(CHATS))

    for _ in itertools.count():
        while waiting:
            number, parts = waiting[0]
            if not isinstance(driver.admit(*look(f"r{number}", *parts, max_tokens=30)), Admitted):
                break
            del waiting[0]
            driver.step()
        driver.step()
        if len(driver.outcomes) == len(CHATS):
            break

    for number, parts in enumerate(CHATS):
        expected = reference.generate(parts, 30)
        assert texts(driver.outcomes[f"r{number}"]) == [expected[2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_answer_does_not_depend_on_what_else_is_read(dtype: str, pictured: Made) -> None:
    engine = pictured_engine(pictured(), dtype=dtype, prefix_cache=False)
    jobs = {
        f"r{number}": look(f"r{number}", *parts, logprobs=True, temperature=1.0, seed=number)
        for number, parts in enumerate(CHATS[:4])
    }
    alone = {name: choices(run_alone(engine, *job)) for name, job in jobs.items()}
    driver = Driver(engine)

    for job in reversed(jobs.values()):
        driver.admit(*job)
        driver.step()
    driver.finish(*jobs)

    assert {name: choices(driver.outcomes[name]) for name in jobs} == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_shorter_types_keep_close_to_the_reference(dtype: str, pictured: Made) -> None:
    path = pictured()
    engine = pictured_engine(path, dtype=dtype)
    outcome = run_alone(engine, *look("r", *CHATS[1], logprobs=True, max_tokens=1))
    exact = run_alone(pictured_engine(path), *look("r", *CHATS[1], logprobs=True, max_tokens=1))

    (found,), (expected,) = choices(outcome), choices(exact)

    assert found["logprobs"][0]["logprob"] == pytest.approx(
        expected["logprobs"][0]["logprob"], abs=0.3
    )


def test_several_answers_to_a_picture_share_its_prompt(pictured: Made) -> None:
    path = pictured()
    outcome = run_alone(pictured_engine(path), *look("r", *CHATS[1], n=3))

    assert isinstance(outcome, Completed)
    count, _, text = PicturedReference(path).generate(CHATS[1], 12)
    assert texts(outcome) == [text] * 3
    assert outcome.usage.input_tokens == count


def test_a_preempted_conversation_reads_its_pictures_again(pictured: Made) -> None:
    path = pictured()
    parts = (WORDS, WIDE, WORDS)
    engine = pictured_engine(path, slots=3, cache_tokens=320, prefix_cache=False)
    driver = Driver(engine)

    for number in range(3):
        driver.admit(*look(f"r{number}", str(number), *parts, max_tokens=60))
    driver.finish("r0", "r1", "r2")

    assert engine._model.scheduler.preempted > 0
    reference = PicturedReference(path)
    for number in range(3):
        expected = reference.generate((str(number), *parts), 60)
        assert texts(driver.outcomes[f"r{number}"]) == [expected[2]]


# --- Prefix cache ---------------------------------------------------------------------------------


def test_blocks_are_shared_only_by_the_same_pictures(pictured: Made) -> None:
    engine = pictured_engine(pictured())
    same_size = picture(60, 30, 9)
    after = WORDS * 6

    def cached(name: str, *parts: str | bytes, **given: Any) -> int:
        outcome = run_alone(engine, *look(name, *parts, **given))
        assert isinstance(outcome, Completed)
        return outcome.usage.cached_input_tokens

    assert cached("first", WIDE, after) == 0
    hit = cached("again", WIDE, after)
    assert hit >= 64
    assert cached("other", same_size, after) == 0
    assert cached("longer", WIDE, after, "and more") == hit
    assert cached("stranger", WIDE, after, account="2") == 0
    # Where only the second picture differs, blocks before it are shared.
    assert cached("two", WORDS * 6, WIDE, after) == 0
    before = cached("changed", WORDS * 6, same_size, after)
    assert 64 <= before < cached("two-again", WORDS * 6, WIDE, after)


def test_an_answer_from_the_cache_is_the_same(pictured: Made) -> None:
    engine = pictured_engine(pictured())
    parts = (WORDS, WIDE, WORDS * 2, TALL, "?")

    first, second = (
        run_alone(engine, *look(name, *parts, logprobs=True)) for name in ("first", "second")
    )

    assert isinstance(second, Completed)
    assert second.usage.cached_input_tokens >= 64
    assert choices(first) == choices(second)


def test_a_block_that_ends_within_a_picture_depends_on_all_of_it() -> None:
    def prompt(digest: bytes) -> PicturePrompt:
        return PicturePrompt([5, 6, 99, 7], [Picture(torch.zeros(8, 1), 1, 2, digest)], mark=99)

    one, other, half = (
        prompt(bytes([a]) * 8 + bytes([b]) * 8) for a, b in ((1, 2), (3, 4), (1, 4))
    )

    assert one.ids == other.ids == [5, 6, 99, 99, 7]
    assert one.keys[:1] == other.keys[:1] == [5]
    assert one.keys[1:3] != other.keys[1:3]
    assert one.keys[1:3] != half.keys[1:3]
    assert max(one.keys[1:4]) < 0


def test_positions_behind_a_picture_follow_its_longer_side() -> None:
    shown = [Picture(torch.zeros(24, 1), 2, 3, bytes(16)), Picture(torch.zeros(4, 1), 1, 1, b"")]
    prompt = PicturePrompt([5, 99, 6, 99], shown, mark=99)

    found = [*prompt.part(0, 1).positions.tolist(), [prompt.shift]]
    for one in shown:
        one.features = torch.zeros(one.tokens, 1)

    assert found == [[0], [0], [0], [-3]]
    assert prompt.part(0, 9).positions.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    assert prompt.part(2, 9).places == [0, 1, 2, 3, 4, 6]


# --- Sizes ----------------------------------------------------------------------------------------


def test_no_picture_takes_more_tokens_than_it_was_quoted_for(pictured: Made) -> None:
    engine = pictured_engine(pictured())
    (text,) = [run_alone(engine, *look("text", "x"))]
    assert isinstance(text, Completed)

    for number, size in enumerate([(1, 1), (2000, 100), (640, 480), (100, 3000), (8, 8)]):
        outcome = run_alone(engine, *look(f"r{number}", "x", picture(*size)))

        assert isinstance(outcome, Completed), outcome
        more = outcome.usage.input_tokens + outcome.usage.cached_input_tokens
        assert 3 <= more - text.usage.input_tokens <= PICTURE_TOKENS


def test_options_bound_the_pixels_of_a_picture(pictured: Made) -> None:
    path = pictured()

    def count(**options: Any) -> int:
        outcome = run_alone(pictured_engine(path, **options), *look("r", LARGE))
        assert isinstance(outcome, Completed)
        return outcome.usage.input_tokens

    assert count(picture_pixels_max=8 * 64) < count()
    assert count(picture_pixels_max=16 * 64, picture_pixels_min=12 * 64) >= 12


@pytest.mark.parametrize(
    ("source_tokens", "options", "said"),
    [
        (2, {}, "takes 1 tokens and 2 around it"),
        (40, {"picture_pixels_max": 39 * 64}, "takes 39 tokens and 2 around it"),
        (40, {"picture_pixels_max": 9}, "a token takes 64"),
        (40, {"picture_pixels_max": 640, "picture_pixels_min": 700}, "700 to 640 pixels"),
        (None, {"picture_pixels_max": 640}, r"state input: \[text, image\]"),
        (40, {"picture_pixels_max": 0}, "at least 1"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(
    source_tokens: int | None, options: dict[str, Any], said: str, pictured: Made
) -> None:
    with pytest.raises(ValueError, match=said):
        LlmEngine(pictured_spec(pictured(), source_tokens, **options)).inspect()


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"no picture", "PNG, JPEG, WebP and GIF are accepted"),
        (LARGE[:400], "image"),
        (picture(2010, 10), "ratio of at most 200:1"),
        (picture(1990, 10), "takes 86 tokens at least"),
    ],
)
def test_a_bad_picture_is_named(data: bytes, said: str, pictured: Made) -> None:
    engine = pictured_engine(pictured())
    job, files = look("r", "a", WIDE, data)

    value = engine.prepare(job, files)
    admission = Driver(engine).admit(job, files)

    assert isinstance(value, Failed)
    assert value == admission
    assert (value.code, value.param) == ("invalid_input", "messages")
    assert value.message.startswith("Picture 2 of the conversation: ")
    assert said in value.message


def test_a_picture_of_pixels_without_end_is_refused_by_its_header(pictured: Made) -> None:
    engine = pictured_engine(pictured())
    header = picture(8, 8)
    bomb = header[:16] + (60_000).to_bytes(4) * 2 + header[24:]

    assert isinstance(engine.prepare(*look("r", bomb)), Failed)


def test_pictures_are_read_before_admission(pictured: Made) -> None:
    engine = pictured_engine(pictured())
    job, files = look("r", "a", WIDE)
    driver = Driver(engine)

    admission = engine.admit(job, driver.clock, Prepared(engine.prepare(job, files)))

    assert isinstance(admission, Admitted)


def test_a_missing_attachment_is_an_error(pictured: Made) -> None:
    job, files = look("r", WIDE, TALL)

    admission = Driver(pictured_engine(pictured())).admit(job, files[:1])

    assert isinstance(admission, Failed)
    assert "no attachment 1" in admission.message


def test_without_a_limit_for_pictures_the_model_reads_none(pictured: Made) -> None:
    path = pictured()
    engine, whole = pictured_engine(path, None), pictured_engine(path)

    admission = Driver(engine).admit(*look("r", WIDE))

    assert isinstance(admission, Failed)
    assert admission.message == "looker reads no images."
    assert engine.memory.weights_bytes < whole.memory.weights_bytes
    text = ("the quick fox",)
    outcome = run_alone(engine, *look("t", *text))
    assert texts(outcome) == [PicturedReference(path).generate(text, 12)[2]]


def test_what_cannot_read_pictures_is_refused_at_load(tmp_path: Path, pictured: Made) -> None:
    blind = make_checkpoint("qwen2", tmp_path / "blind")
    silent = make_pictured(
        "qwen2.5vl", tmp_path / "silent", template=TEMPLATE.replace("<|image_pad|>", "")
    )
    unprocessed = make_pictured("qwen2.5vl", tmp_path / "unprocessed")
    (unprocessed / "preprocessor_config.json").unlink()
    for path, said in (
        (blind, "a Qwen2ForCausalLM has no vision tower"),
        (silent, "does not write the token"),
        (unprocessed, "has no preprocessor_config.json"),
    ):
        with pytest.raises(ValueError, match=said):
            LlmEngine(pictured_spec(path)).inspect()
        with pytest.raises(ValueError, match=said):
            pictured_engine(path)


def test_control_tokens_of_a_client_are_no_pictures(pictured: Made) -> None:
    engine = pictured_engine(pictured())

    outcome = run_alone(engine, *look("r", "<|image_pad|>", WIDE, "<|vision_start|>"))

    assert isinstance(outcome, Completed)


# --- Memory and time ------------------------------------------------------------------------------


def test_the_tower_is_part_of_the_memory_and_freed_with_it(pictured: Made) -> None:
    engine = pictured_engine(pictured())
    tower = engine.checkpoint.tower
    assert tower is not None
    parameters = sum(one.numel() for one in tower._tower.parameters())
    with_tower = engine.memory.weights_bytes
    without = pictured_engine(pictured(), None).memory.weights_bytes

    assert with_tower - without >= 4 * parameters
    assert engine.demand().bytes >= with_tower
    engine.unload()
    assert engine._loaded is None


def test_features_are_dropped_once_the_prompt_is_read(pictured: Made) -> None:
    engine = pictured_engine(pictured())
    driver = Driver(engine)
    driver.admit(*look("r", WIDE, "a"))
    driver.admit(*look("text", WORDS))
    (choice,) = engine._requests[look("r")[0].request_id].choices.values()
    assert choice.pictures is not None

    weights = driver.step()
    shown = list(choice.pictures.pictures_in(0, len(choice.prompt)))

    assert [one.features for one in shown] == [None]
    tokens = {name: len(each.prompt) for name, each in _choices(engine).items()}
    # The tower's work is part of the request's share of the step.
    assert weights["r"] / tokens["r"] > 2 * weights["text"] / tokens["text"]


def _choices(engine: LlmEngine) -> dict[str, Any]:
    return {
        id: choice
        for id, request in engine._requests.items()
        for choice in request.choices.values()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_decoded_between_the_layers_of_the_tower(
    family: str, pictured: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pictured(family)
    reference = PicturedReference(path)
    engine = pictured_engine(path, slots=4)
    driver = Driver(engine)
    driver.admit(*look("text", WORDS, max_tokens=40))
    driver.step()
    monkeypatch.setattr(launch, "SLICE_S", 0.0)
    for number, parts in enumerate(((WIDE, "a", TALL), (TALL, "b"))):
        driver.admit(*look(f"r{number}", *parts, account=str(number), max_tokens=20))

    # The convolution, what is before two layers, and each of them, for each of three pictures.
    costs: Counter[str] = Counter()
    for step in range(11):
        costs.update(driver.step())
        assert len(driver.events["text/0"]) == 2 + step
    assert not driver.events.get("r1/0")
    assert costs["r0"] > costs["r1"] > 0
    driver.finish("text", "r0", "r1")

    assert texts(driver.outcomes["r0"]) == [reference.generate((WIDE, "a", TALL), 20)[2]]
    assert texts(driver.outcomes["r1"]) == [reference.generate((TALL, "b"), 20)[2]]
    assert texts(driver.outcomes["text"]) == [reference.generate((WORDS,), 40)[2]]


def test_a_picture_whose_request_ends_is_encoded_no_further(
    pictured: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SLICE_S", 0.0)
    engine = pictured_engine(pictured())
    driver = Driver(engine)
    driver.admit(*look("r", WIDE, "a"))
    driver.step()
    (choice,) = _choices(engine).values()
    assert choice.pictures is not None
    (shown,) = choice.pictures.pictures_in(0, len(choice.prompt))
    assert shown.encoding is not None
    computation = shown.encoding.computation

    engine.cancel(look("r")[0].request_id, "client")
    driver.step()

    assert isinstance(driver.outcomes["r"], Cancelled)
    assert computation.dead
    assert shown.encoding is None
    again = run_alone(engine, *look("again", WIDE, "a"))
    assert texts(again) == [PicturedReference(pictured()).generate((WIDE, "a"), 12)[2]]
