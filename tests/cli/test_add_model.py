"""``tollgate model add``: the entry, its place in the file, its proof, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.catalog.editing.insertion import insert_entry
from gateway.catalog.loader import load_catalog
from gateway.commands.planning.proposal import propose, propose_price
from gateway.ledger.expenses import ExpenseRates
from gateway.plan.hardware import find_gpu
from tests.cli.here import run_here
from tests.workers.llm.pictures import make_pictured

POCKET = Path(__file__).parents[2] / "workers" / "pocket"
CATALOG = """\
# Ours.
models:
  - name: first  # the first
    task: text-generation
    engine: echo
    limits: {output_tokens: 64}
    price: [{unit: request, amount: "0.1"}]
    description: |
      Two lines,
      of text.
# The end.
aliases: {one: first}
"""


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    file = tmp_path / "catalog.yaml"
    file.write_text(CATALOG)
    return file


def test_a_checkpoint_is_proved_and_written_between_the_comments(catalog: Path) -> None:
    arguments = ("model", "add", str(POCKET / "chat"), "--name", "ours", "--catalog", str(catalog))
    price = ("--price", "input_token 0.1 1000000", "--price", "output_token 0.4 1000000")

    done = run_here((*arguments, *price, "--json"), {})

    assert done.exit_code == 0, done.stderr
    made = json.loads(done.stdout)
    assert "4 requests answered" in made["proof"]
    text = catalog.read_text()
    before, after = text.split("\n  - name: ours\n")
    assert before == CATALOG.split("# The end.")[0]
    assert after.endswith(CATALOG[CATALOG.index("# The end.") :])
    _, entry = load_catalog(catalog).models
    assert (entry.engine, entry.task, entry.options["dtype"]) == (
        "llm",
        "text-generation",
        "bfloat16",
    )
    assert (entry.limits.context_tokens, entry.limits.output_tokens) == (1024, 512)


@pytest.mark.parametrize(
    ("directory", "more", "said"),
    [
        ("chat", ("--name", "one"), "already has 'one'"),
        ("nowhere", (), "hf download OWNER/NAME"),
        ("chat", (), "set --price"),
        ("gpt2", (), "add an `upstream` entry"),
        ("chat", ("--price", "image 1"), "text-generation is not measured in images"),
    ],
)
def test_what_cannot_be_added_is_refused(
    directory: str, more: tuple[str, ...], said: str, catalog: Path
) -> None:
    path = POCKET / directory
    if directory == "gpt2":
        path = catalog.parent / "gpt2"
        path.mkdir()
        (path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "n_head": 2}')

    done = run_here(("model", "add", str(path), "--catalog", str(catalog), *more), {})

    assert done.exit_code == 1
    assert said in done.stderr
    assert catalog.read_text() == CATALOG


@pytest.mark.parametrize(
    ("directory", "task", "engine", "units"),
    [
        ("chat", "text-generation", "llm", ["input_token", "output_token"]),
        ("image", "text-to-image", "diffusion", ["image"]),
        ("video", "text-to-video", "diffusion", ["video_second"]),
        ("speech", "text-to-speech", "speech", ["audio_second"]),
        ("upscale", "image-upscale", "upscale", ["image"]),
    ],
)
def test_the_entry_is_proposed_from_the_directory(
    directory: str, task: str, engine: str, units: list[str], tmp_path: Path
) -> None:
    found = propose(
        POCKET / directory,
        name="ours",
        checkpoint="x",
        task=None,
        devices=(find_gpu("H200"),),
        rates=ExpenseRates(hour_nanos=3_200_000_000),
    )

    price = propose_price(found)

    assert price[0]["amount"] > "0"
    assert (found.fields["task"], found.fields["engine"]) == (task, engine)
    assert [line["unit"] for line in price] == units
    file = tmp_path / "catalog.yaml"
    file.write_text(insert_entry(CATALOG, {**found.fields, "price": price}))
    assert load_catalog(file).models[-1].name == "ours"


def test_a_catalog_of_another_form_is_left_alone() -> None:
    for text in ("models: []\n", "models: [{name: a}]\n", "aliases: {}\n", ""):
        with pytest.raises(ValueError, match="no list of entries"):
            insert_entry(text, {"name": "a"})


@pytest.mark.long
def test_a_model_with_a_vision_tower_is_added_to_read_pictures(
    catalog: Path, tmp_path: Path
) -> None:
    path = make_pictured("qwen2.5vl", tmp_path / "looker")
    price = ("--price", "input_token 0.1 1000000", "--price", "output_token 0.4 1000000")

    done = run_here(("model", "add", str(path), "--catalog", str(catalog), *price), {})
    checked = run_here(("catalog", "check", "--deep", str(catalog)), {})

    assert done.exit_code == 0, done.stderr
    *_, entry = load_catalog(catalog).models
    assert (entry.engine, entry.input) == ("llm", ("text", "image"))
    assert (entry.limits.sources, entry.limits.source_tokens) == (4, 1024)
    assert checked.exit_code == 0, checked.stderr + checked.stdout


def test_the_deep_check_finds_a_model_that_cannot_read_pictures(catalog: Path) -> None:
    price = ("--price", "input_token 0.1 1000000", "--price", "output_token 0.4 1000000")
    arguments = ("model", "add", str(POCKET / "chat"), "--name", "ours", "--catalog", str(catalog))
    run_here((*arguments, *price), {})
    text = catalog.read_text().replace("context_tokens: 1024", "source_tokens: 99")
    catalog.write_text(text.replace("engine: llm\n", "engine: llm\n    input: [text, image]\n"))

    checked = run_here(("catalog", "check", "--deep", str(catalog)), {})

    assert checked.exit_code == 1
    assert "has no vision tower" in checked.stderr + checked.stdout
