"""The shipped catalog: every market model at its price, and our own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from gateway.catalog.loader import check, load_catalog
from gateway.catalog.schema import CatalogEntry, Dialect, Engine, Upstream
from gateway.catalog.tasks import TASKS, Task
from gateway.pricing import charge, format_usd, parse_usd, quote
from gateway.tasks.registry import parse, prepare
from gateway.tasks.text import TextGeneration
from workers.contract.jobs import Usage
from workers.contract.models import ModelSpec, UpstreamSpec, read_specs
from workers.engines.registry import ENGINES
from workers.upstreams.dialects import DIALECTS

CATALOG = Path(__file__).parents[2] / "catalog.yaml"
FACTS = yaml.safe_load((Path(__file__).parent / "market_prices.yaml").read_text())
MARKET = FACTS["models"]


@pytest.fixture(scope="module")
def entries() -> dict[str, CatalogEntry]:
    return {entry.name: entry for entry in load_catalog(CATALOG).models}


def test_catalog_has_no_problems() -> None:
    assert [problem for problem in check(CATALOG) if problem.level == "error"] == []


def test_there_are_twenty_three_market_models(entries: dict[str, CatalogEntry]) -> None:
    sent_elsewhere = {name for name, entry in entries.items() if entry.upstream is not None}

    assert len(MARKET) == 23
    assert sent_elsewhere == {fact["name"] for fact in MARKET}


@pytest.mark.parametrize("fact", MARKET, ids=lambda fact: fact["name"])
def test_a_market_model_does_its_tasks_and_waits_for_a_credential(
    entries: dict[str, CatalogEntry], fact: dict[str, Any]
) -> None:
    entry = entries[fact["name"]]

    assert entry.task == fact["task"]
    assert list(entry.also) == fact.get("also", [])
    assert entry.upstream is not None
    assert entry.upstream.dialect == "gmi"
    assert entry.upstream.credential == "GMI_API_KEY"
    assert entry.family
    assert entry.vendor
    assert entry.description
    assert entry.good_for


@pytest.mark.parametrize("fact", MARKET, ids=lambda fact: fact["name"])
def test_a_market_model_is_quoted_and_charged_to_the_nano_dollar(
    entries: dict[str, CatalogEntry], fact: dict[str, Any]
) -> None:
    entry = entries[fact["name"]]
    given = parse(entry.task, smallest_media(entry.task))

    prepared = prepare(entry, given)
    most = quote(entry.selling_price, prepared.limits)
    due = charge(entry.selling_price, Usage(requests=1, images=1, video_ms=5000, audio_ms=900))

    assert FACTS["currency"] == "USD"
    assert FACTS["unit"] == "request"
    assert most.total_nanos == due.total_nanos == parse_usd(fact["price"])


def test_sum_of_the_prices_matches_the_source(entries: dict[str, CatalogEntry]) -> None:
    total = sum(
        quote(entries[fact["name"]].selling_price, Usage(requests=1)).total_nanos for fact in MARKET
    )

    assert format_usd(total) == "2.169703"


def smallest_media(task: Task) -> dict[str, Any]:
    """What a task needs that reads no conversation: a text, and what else it reads."""
    if task == "talking-head":
        return {name: f"https://example.com/it.{name}" for name in ("image", "audio")}
    spoken = task in ("text-to-speech", "voice-clone")
    given: dict[str, Any] = {"text" if spoken else "prompt": "a lighthouse in fog"}
    if task == "voice-clone":
        given["recording"] = "https://example.com/voice.mp3"
    if task == "image-blend":
        given["images"] = [f"https://example.com/{name}.png" for name in ("lighthouse", "ship")]
    elif "image" in TASKS[task].reads:
        given["image"] = "https://example.com/lighthouse.png"
    if "video" in TASKS[task].reads:
        given["video"] = "https://example.com/lighthouse.mp4"
    return given


def entries_and_tasks() -> list[tuple[CatalogEntry, Task]]:
    """Whatever has a price of its own, once for each of its tasks."""
    priced = [entry for entry in load_catalog(CATALOG).models if entry.price]
    return [(entry, task) for entry in priced for task in (entry.task, *entry.also)]


@pytest.mark.parametrize(
    ("entry", "task"), entries_and_tasks(), ids=lambda value: getattr(value, "name", value)
)
def test_every_model_on_sale_has_a_price(entry: CatalogEntry, task: Task) -> None:
    smallest = smallest_media(task)
    if task == "text-generation":
        smallest = {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    elif task == "text-embedding":
        smallest = {"input": "x"}
    prepared = prepare(entry, parse(task, smallest), task=task)
    # The least that such a request can be said to have used: one unit of what the task makes.
    used = {
        "text": Usage(requests=1, cached_input_tokens=1),
        "embedding": Usage(requests=1, input_tokens=1),
        "transcript": Usage(requests=1, audio_ms=1),
        "image": Usage(requests=1, images=1),
        "video": Usage(requests=1, video_ms=1),
        "audio": Usage(requests=1, audio_ms=1, characters=1),
    }[TASKS[task].makes]

    most = quote(entry.selling_price, prepared.limits).total_nanos
    due = charge(entry.selling_price, used).total_nanos

    assert 0 < due <= most


def test_names_are_matched_by_case(entries: dict[str, CatalogEntry]) -> None:
    assert "Veo3" in entries
    assert "veo3" not in entries


def test_pocket_chat_runs_locally_at_its_price_per_token(entries: dict[str, CatalogEntry]) -> None:
    entry = entries["pocket-chat"]
    given = parse(
        entry.task, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}
    )
    assert isinstance(given, TextGeneration)

    most = quote(entry.selling_price, prepare(entry, given).limits)

    assert entry.engine == "llm"
    assert (CATALOG.parent / str(entry.checkpoint) / "config.json").is_file()
    assert entry.license == "Apache-2.0"
    # 85 input tokens at most ($0.02 per million) and 100 output tokens ($0.08 per million).
    assert most.total_nanos == 85 * 20 + 100 * 80


def test_test_engines_are_not_on_sale(entries: dict[str, CatalogEntry]) -> None:
    assert "echo" not in {entry.engine for entry in entries.values()}


def test_a_worker_reads_the_same_routes_from_the_same_file(
    entries: dict[str, CatalogEntry],
) -> None:
    specs = {spec.name: spec for spec in read_specs(CATALOG)}

    assert specs.keys() == {name for name, entry in entries.items() if entry.workflow is None}
    for name, spec in specs.items():
        entry = entries[name]
        assert (spec.task, spec.engine) == (entry.task, entry.engine)
        assert spec.options.keys() == entry.options.keys()  # paths are made absolute
        assert spec.limits == entry.limits.model_dump(exclude_unset=True)
        assert (spec.upstream is None) == (entry.upstream is None)
        if spec.upstream is not None and entry.upstream is not None:
            for field in UpstreamSpec.__struct_fields__:
                assert getattr(spec.upstream, field) == getattr(entry.upstream, field)


def test_the_gateway_checks_whatever_a_worker_reads() -> None:
    assert set(ModelSpec.__struct_fields__) <= CatalogEntry.model_fields.keys()
    assert set(UpstreamSpec.__struct_fields__) == Upstream.model_fields.keys()
    assert set(get_args(Engine)) == ENGINES.keys()
    assert set(get_args(Dialect)) >= DIALECTS.keys()


def test_a_draft_model_is_named_by_its_entry_or_its_directory(tmp_path: Path) -> None:
    entry = "{name: %s, task: text-generation, engine: llm, checkpoint: %s, options: %s}"
    small = entry % ("small", "models/small", "{}")
    named = entry % ("named", "big", "{speculation: {method: draft, checkpoint: small}}")
    placed = entry % ("placed", "big", "{speculation: {method: draft, checkpoint: other/dir}}")
    (tmp_path / "catalog.yaml").write_text(f"models: [{small}, {named}, {placed}]")

    specs = read_specs(tmp_path / "catalog.yaml")

    found = [spec.options.get("speculation", {}).get("checkpoint") for spec in specs]
    assert found == [None, str(tmp_path / "models/small"), str(tmp_path / "other/dir")]


def test_adapters_and_an_upscaler_are_found_from_the_catalog(tmp_path: Path) -> None:
    entry = "{name: %s, task: text-to-image, engine: diffusion, checkpoint: %s, options: %s}"
    larger = entry % ("larger", "models/larger", "{}")
    named = entry % ("named", "painter", "{upscaler: larger, lora: [{checkpoint: oils, scale: 2}]}")
    placed = entry % ("placed", "painter", "{upscaler: other/dir, lora: [7]}")
    (tmp_path / "catalog.yaml").write_text(f"models: [{larger}, {named}, {placed}]")

    _, one, other = read_specs(tmp_path / "catalog.yaml")

    assert one.options["upscaler"] == str(tmp_path / "models/larger")
    assert one.options["lora"] == [{"checkpoint": str(tmp_path / "oils"), "scale": 2}]
    assert other.options == {"upscaler": str(tmp_path / "other/dir"), "lora": [7]}
