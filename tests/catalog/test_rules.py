"""Rules within an entry; every entry that follows them can be billed."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.catalog.rules import Conflicts
from gateway.catalog.schema import CONDITIONS, CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.pricing import Unit, charge, clip, quote
from gateway.tasks.registry import parse, prepare
from workers.contract.jobs import Usage


def entry(**fields: Any) -> dict[str, Any]:
    """A video model that is right, but for the fields given."""
    return {
        "name": "film",
        "task": "text-to-video",
        "engine": "echo",
        "limits": {"seconds": 8},
        "price": [line("video_second")],
    } | fields


def line(unit: str, amount: str = "1", **when: str) -> dict[str, Any]:
    return {"unit": unit, "amount": amount, "when": when}


LOOKER = {
    "task": "text-generation",
    "engine": "echo",
    "input": ["text", "image"],
    "limits": {"output_tokens": 9, "source_tokens": 1000},
    "price": [line("request")],
}


def conflicts(**fields: Any) -> list[tuple[str, str]]:
    """Place and message of everything that does not fit together."""
    try:
        CatalogEntry.model_validate(entry(**fields))
    except ValidationError as error:
        (found,) = error.errors()
        said = found["ctx"]["error"]
        assert isinstance(said, Conflicts)
        return [(".".join(map(str, place)), message) for place, message in said.found]
    return []


GMI: Final = {"url": "https://console.gmicloud.ai", "dialect": "gmi", "credential": "GMI_API_KEY"}


def test_valid_entry_has_no_conflicts() -> None:
    assert conflicts() == []
    assert conflicts(engine=None, upstream=GMI) == []


@pytest.mark.parametrize("task", ["text-embedding", "rerank", "speech-to-text"])
def test_tasks_without_a_dialect_need_an_engine(task: str) -> None:
    found = conflicts(engine=None, upstream=GMI, task=task)

    words = f"no dialect of upstreams has the task {task}; run it by an `engine`"
    assert words in [message for _, message in found]


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"engine": "llm"}, "", "the engine llm needs `checkpoint`"),
        ({"engine": None, "upstream": GMI, "checkpoint": "a"}, "checkpoint", "only an engine"),
        (
            {"engine": None, "upstream": {**GMI, "credential": None}},
            "upstream",
            "the dialect gmi needs `credential`",
        ),
        ({"also": ["text-to-video"]}, "also.0", "text-to-video is listed twice"),
        ({"canary": {"a": 60, "b": 41}}, "canary", "the shares add up to 101 %; at most 100"),
        (
            {"engine": None, "upstream": {"endpoints": [{"url": "http://a", "weight": 1}]}},
            "upstream.endpoints",
            "tier 0 has one endpoint, which receives every call",
        ),
        (
            {
                "engine": None,
                "upstream": {"endpoints": [{"url": "http://a", "weight": 1}, {"url": "http://b"}]},
            },
            "upstream.endpoints",
            "of the endpoints of tier 0, give all a `weight` or none",
        ),
        (
            {"also": ["image-to-video", "image-to-video"]},
            "also.1",
            "image-to-video is listed twice",
        ),
        (
            {"input": ["text", "image"]},
            "input",
            "text-to-video itself says what it reads; only text-generation has it",
        ),
        (
            {**LOOKER, "limits": {"output_tokens": 9}},
            "limits",
            "images need limits.source_tokens to bound the price of a prompt",
        ),
        ({**LOOKER, "input": ["image"]}, "input", "a conversation always contains text; add it"),
        (
            {**LOOKER, "engine": None, "upstream": GMI},
            "input",
            "gmi reads no images; the engine llm and the dialect openai do",
        ),
        (
            {**LOOKER, "input": ["text"]},
            "limits.source_tokens",
            "only models that read images have it; see input",
        ),
        (
            {"limits": {"seconds": 8, "choices": 2}},
            "limits.choices",
            "not a limit of text-to-video; accepted: seconds, fps, sources, side, side_step,",
        ),
        (
            {"default_parameters": {"top_k": 1}},
            "default_parameters.top_k",
            "not a default of text-to-video; accepted: quality, steps, guidance, scheduler,",
        ),
        (
            {"default_parameters": {"seconds": 9}},
            "default_parameters.seconds",
            "9.0 is more than limits.seconds (8.0)",
        ),
        (
            {"default_parameters": {"quality": "low"}},
            "default_parameters.quality",
            "'low' is not one of its qualities: it has none",
        ),
        (
            {"limits": {"seconds": 8, "steps": 4}, "qualities": {"high": {"steps": 5}}},
            "qualities.high.steps",
            "5 is more than limits.steps (4)",
        ),
        (
            {"schedulers": ["euler"], "qualities": {"high": {"scheduler": "ddim"}}},
            "qualities.high.scheduler",
            "'ddim' is not one of its schedulers: euler",
        ),
        (
            {"sizes": ["64x64"], "limits": {"seconds": 8, "side": 64}},
            "limits.side",
            "`sizes` lists all supported sizes",
        ),
        (
            {
                "task": "text-generation",
                "limits": {"output_tokens": 9},
                "price": [line("request")],
                "sizes": ["64x64"],
            },
            "sizes",
            "text-generation produces no image or video",
        ),
        (
            {
                "sizes": ["64x64"],
                "price": [line("video_second"), line("video_second", size="32x32")],
            },
            "price.1.when.size",
            "'32x32' is not one of its sizes: 64x64",
        ),
        ({"limits": {}}, "price.0.unit", "a price per video_second needs limits.seconds"),
        ({"price": [line("step")]}, "price.0.unit", "a price per step needs limits.steps"),
        (
            {"price": [line("gpu_second")]},
            "price.0.unit",
            "a price per gpu_second needs limits.gpu_seconds",
        ),
        (
            {
                "engine": None,
                "upstream": GMI,
                "limits": {"gpu_seconds": 9},
                "price": [line("gpu_second")],
            },
            "price.0.unit",
            "upstreams do not report GPU time",
        ),
        (
            {
                "engine": None,
                "upstream": GMI,
                "limits": {"steps": 9},
                "price": [line("step")],
            },
            "price.0.unit",
            "upstreams do not report steps",
        ),
        (
            {"price": [line("request"), line("image")]},
            "price.1.unit",
            "text-to-video is not measured in images; accepted: gpu_second, request, step, video",
        ),
        (
            {
                "task": "text-generation",
                "limits": {"output_tokens": 9},
                "price": [line("input_token")],
            },
            "price",
            "this does not cover text-generation; price its request, or input_token and output_",
        ),
        (
            {"task": "text-generation", "limits": {}, "price": [line("request")]},
            "limits",
            "text-generation needs limits.output_tokens to bound its price",
        ),
        (
            {
                "task": "text-generation",
                "limits": {"context_tokens": 8, "output_tokens": 9},
                "price": [line("request")],
            },
            "limits.output_tokens",
            "9 is more than context_tokens (8)",
        ),
        (
            {"price": [line("video_second"), line("video_second", "2")]},
            "price.1",
            "video_second already has a price",
        ),
        (
            {"price": [line("video_second"), *[line("video_second", resolution="720p")] * 2]},
            "price.2",
            "video_second already has a price when resolution=720p",
        ),
        (
            {"price": [line("video_second", resolution="720p")]},
            "price.0.when",
            "video_second has only conditional prices; add a line without `when`",
        ),
        (
            {
                "price": [
                    line("video_second"),
                    line("video_second", resolution="720p"),
                    line("video_second", quality="high"),
                ]
            },
            "price.2.when",
            "resolution=720p and quality=high can both apply; add a line for both together",
        ),
        (
            {
                "resolutions": ["480p", "720p"],
                "price": [line("video_second"), line("video_second", resolution="720")],
            },
            "price.1.when.resolution",
            "'720' is not one of its resolutions: 480p, 720p",
        ),
        (
            {
                "task": "text-generation",
                "limits": {"output_tokens": 9},
                "price": [line("request"), line("request", quality="high")],
            },
            "price.1.when",
            "text-generation has no quality; leave `when` out",
        ),
        (
            {"limits": {"seconds": 10}, "price": [line("video_second", "999999999")]},
            "price",
            "the largest request would cost more than 9223372036.854775807 USD, the largest amount",
        ),
        (
            {
                "task": "text-generation",
                "limits": {"output_tokens": 9},
                "price": [line("input_token", "10"), line("output_token")],
            },
            "price",
            "the largest request would cost more than 9223372036.854775807 USD, the largest amount",
        ),
    ],
)
def test_conflict_is_reported_with_its_place(
    fields: dict[str, Any], place: str, message: str
) -> None:
    (found,) = conflicts(**fields)

    assert found[0] == place
    assert found[1].startswith(message)


def test_conditions_are_clear_once_a_line_names_both() -> None:
    assert (
        conflicts(
            price=[
                line("video_second"),
                line("video_second", resolution="720p"),
                line("video_second", quality="high"),
                line("video_second", resolution="720p", quality="high"),
            ]
        )
        == []
    )


def test_conditions_on_listed_values_and_bookable_prices_are_valid() -> None:
    banded = [line("video_second"), line("video_second", resolution="720p")]

    assert conflicts(price=banded, resolutions=["480p", "720p"]) == []
    assert conflicts(limits={"seconds": 9}, price=[line("video_second", "999999999")]) == []


def test_unknown_condition_is_reported_with_the_known_ones() -> None:
    with pytest.raises(
        ValidationError, match="'siz' is not a valid condition; accepted: size, quality, res"
    ):
        CatalogEntry.model_validate(entry(price=[line("video_second", siz="1")]))


def test_all_conflicts_are_reported_together() -> None:
    found = conflicts(engine="llm", limits={"images": 1}, price=[line("image")])

    assert [place for place, _ in found] == ["", "limits.images", "price.0.unit", "price"]


ATTRIBUTES = st.dictionaries(st.sampled_from(CONDITIONS), st.sampled_from(["a", "b"]))
# Whatever ran has used something of all that it can use.
QUANTITY = st.integers(1, 3000)
COUNTED: Final[dict[str, list[Unit]]] = {
    "text": ["request", "input_token", "cached_input_token", "output_token", "gpu_second"],
    "embedding": ["request", "input_token", "gpu_second"],
    "ranking": ["request", "input_token", "gpu_second"],
    "transcript": ["request", "audio_second", "gpu_second"],
    "image": ["request", "image", "step", "gpu_second"],
    "video": ["request", "video_second", "step", "gpu_second"],
    "audio": ["request", "audio_second", "character", "step", "gpu_second"],
}


@st.composite
def price_lines(draw: st.DrawFn, units: list[Unit]) -> list[dict[str, Any]]:
    chosen = draw(st.lists(st.sampled_from(units), min_size=1, max_size=4, unique=True))
    lines = [
        {
            "unit": unit,
            "amount": draw(st.sampled_from(["0.000000001", "0.02", "3", "999999999"])),
            "per": draw(st.sampled_from([1, 3, 1000, 1_000_000])),
            "when": when,
        }
        for unit in chosen
        for when in [{}, *draw(st.lists(ATTRIBUTES, max_size=4))]
    ]
    return draw(st.permutations(lines))


@settings(deadline=None)
@given(
    data=st.data(),
    task=st.sampled_from(list(TASKS)),
    usage=st.builds(
        Usage,
        requests=st.just(1),
        input_tokens=QUANTITY,
        cached_input_tokens=QUANTITY,
        output_tokens=QUANTITY,
        images=QUANTITY,
        video_ms=QUANTITY,
        audio_ms=QUANTITY,
        characters=QUANTITY,
        steps=QUANTITY,
        gpu_us=QUANTITY,
        attributes=ATTRIBUTES,
    ),
)
def test_every_valid_entry_can_be_quoted_and_billed_within_its_quote(
    data: st.DataObject, task: Task, usage: Usage
) -> None:
    lines = data.draw(price_lines(COUNTED[TASKS[task].makes]))
    makes = TASKS[task].makes
    limits: dict[str, float] = {"gpu_seconds": 0.002}
    limits |= {"output_tokens": 20} if makes == "text" else {}
    limits |= {"steps": 30} if makes not in ("text", "embedding", "ranking", "transcript") else {}
    limits |= {"seconds": 2} if makes in ("video", "audio", "transcript") else {}
    try:
        model = CatalogEntry.model_validate(
            {"name": "m", "task": task, "engine": "echo", "limits": limits, "price": lines}
        )
    except ValidationError:
        assume(False)
    given: dict[str, Any] = {"prompt": "Hello"}
    if makes == "text":
        given = {"messages": [{"role": "user", "content": "Hello"}]}
    elif makes == "embedding":
        given = {"input": "Hello"}
    elif makes == "ranking":
        given = {"query": "Hello", "documents": ["Hello"]}
    elif task in ("text-to-speech", "voice-clone"):
        given = {"text": "Hello"}
    elif task in ("talking-head", "speech-to-text"):
        given = {}
    for kind in {"image", "video", "audio"}.intersection(TASKS[task].reads):
        field = "recording" if task == "voice-clone" else kind
        given[field] = f"https://example.com/{kind}"
    if task == "image-blend":
        given["images"] = [given.pop("image")] * 2
    prepared = prepare(model, parse(task, given), task=task)

    most = quote(model.selling_price, prepared.limits)
    due = charge(model.selling_price, clip(usage, prepared.limits)[0])

    assert 0 < due.total_nanos <= most.total_nanos


@settings(deadline=None)
@given(lines=price_lines(["image"]), attributes=ATTRIBUTES, data=st.data())
def test_the_order_of_price_lines_does_not_matter(
    lines: list[dict[str, Any]], attributes: dict[str, str], data: st.DataObject
) -> None:
    fields = {"name": "m", "task": "text-to-image", "engine": "echo"}
    try:
        one = CatalogEntry.model_validate({**fields, "price": lines})
    except ValidationError:
        assume(False)
    other = CatalogEntry.model_validate({**fields, "price": data.draw(st.permutations(lines))})
    usage = Usage(requests=1, images=2, attributes=attributes)

    assert charge(one.selling_price, usage) == charge(other.selling_price, usage)
