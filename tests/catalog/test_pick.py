"""Picks by task, role and budget: those of the market's own documents, and how they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.catalog.loader import load_catalog
from gateway.catalog.picking.pick import pick, read_wish
from gateway.catalog.picking.typical import typical_nanos, typical_orders, typical_usage
from gateway.catalog.picking.words import stem
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS
from gateway.catalog.views import PickView
from gateway.catalog.vocabulary.words import known_words
from gateway.errors import InvalidRequest
from gateway.pricing import charge, parse_usd
from gateway.tasks.registry import parse, prepare
from gateway.tasks.understanding import check_understood
from gateway.tasks.workflow_submission import WorkflowSubmission
from gateway.workflows.plan import StepModels, plan
from workers.contract.announcements import Announcement

CATALOG = load_catalog(Path(__file__).parents[2] / "catalog.yaml").models
ENTRIES = {entry.name: entry for entry in CATALOG}
FACTS = yaml.safe_load((Path(__file__).parent / "market_picks.yaml").read_text())
HERE = Announcement("w1", models=tuple(e.name for e in CATALOG if e.upstream is None))


def ask(entries: tuple[CatalogEntry, ...] = CATALOG, **asked: Any) -> PickView:
    budget = asked.pop("budget", None)
    wish = read_wish(entries, budget_nanos=budget and parse_usd(budget), **asked)
    return pick(entries, [HERE], wish, find=ENTRIES.get)


@pytest.mark.parametrize("budgeted", [False, True], ids=["any price", "its price"])
@pytest.mark.parametrize(
    "fact", FACTS["picks"], ids=lambda fact: f"{fact['document']} {fact['role']}, {fact['task']}"
)
def test_pick_of_the_documents_is_among_the_first_two(fact: dict[str, Any], budgeted: bool) -> None:
    found = ask(role=fact["role"], task=fact["task"], budget=fact["price"] if budgeted else None)

    assert fact["model"] in [one["name"] for one in found["ranked"][:2]]
    assert found["best"] == found["ranked"][0]


@pytest.mark.parametrize(
    ("asked", "best"),
    [
        # Other words than those of the documents, and of the reasons in the catalog.
        ({"text": "product photos", "budget": "0.05"}, "bria-fibo-relight"),
        ({"text": "sharpen my old film"}, "bria-video-increase-resolution"),
        ({"text": "posters with lettering"}, "reve-create-20250915"),
        ({"text": "narrate in 40 languages"}, "minimax-tts-speech-2.6-turbo"),
        ({"text": "a song with vocals"}, "minimax-music-2.5"),
        ({"text": "anime style"}, "bria-fibo-restyle"),
        ({"task": "text to video", "budget": "0.03"}, "pixverse-v5.6-t2v"),
        # Words that describe no model for a task that is named only rank.
        ({"task": "text-to-speech", "text": "posters"}, "inworld-tts-1.5-mini"),
        ({"text": "chat"}, "pocket-chat"),
    ],
)
def test_other_words_lead_to_the_model_for_them(asked: dict[str, Any], best: str) -> None:
    found = ask(**asked)["best"]

    assert found is not None
    assert found["name"] == best


def test_tiers_are_those_of_the_documents() -> None:
    told = {name: tier for tier, names in FACTS["tiers"].items() for name in names}

    assert {name: ENTRIES[name].tier for name in told} == told
    assert all(entry.tier == "demo" for entry in CATALOG if entry.upstream is None)


def test_cheaper_better_and_local_models_are_offered_beside_the_best() -> None:
    found = ask(task="text-to-speech", role="engineer", budget="0.08")

    picked = [found[name] for name in ("best", "cheaper", "better", "today")]  # type: ignore[literal-required]
    assert [one and one["name"] for one in picked] == [
        "inworld-tts-1.5-mini",
        None,
        "minimax-tts-speech-2.6-turbo",
        "pocket-speech",
    ]
    assert [one and one["available"] for one in picked] == [False, None, False, True]
    best, _, better, today = picked
    assert best["typical_price"] == "0.005"
    assert best["what_if"] == {"results": 1000, "cost": "5"}
    assert "it suits the role engineer" in best["why"]
    assert "of the tier middle, for $0.055 more a result than inworld" in better["why"]
    assert today["why"].endswith("it runs on this gateway.")


def test_cheaper_is_the_best_of_what_costs_less() -> None:
    found = ask(task="image-edit", role="researcher")

    assert found["best"] is not None
    assert found["cheaper"] is not None
    assert (found["best"]["name"], found["cheaper"]["name"]) == (
        "bria-fibo-edit",
        "reve-edit-fast-20251030",
    )
    assert "$0.033 less a result than bria-fibo-edit" in found["cheaper"]["why"]


def test_budget_below_every_price_names_the_nearest() -> None:
    found = ask(task="voice-clone", budget="0.0001")

    assert found["best"] is None
    assert found["ranked"] == []
    assert found["better"] is not None
    assert found["better"]["name"] == "pocket-speech"
    assert found["message"] == (
        "Nothing costs at most $0.0001 a result; the nearest is pocket-speech at $0.0005."
    )


def test_price_of_the_account_decides() -> None:
    dear = ENTRIES["inworld-tts-1.5-mini"]
    cheap = dear.model_validate(
        {**dear.model_dump(exclude_unset=True), "price": [{"unit": "request", "amount": "0.0001"}]}
    )
    own = tuple(cheap if entry is dear else entry for entry in CATALOG)

    found = ask(own, task="text-to-speech", budget="0.001")["best"]

    assert found is not None
    assert (found["name"], found["typical_price"]) == ("inworld-tts-1.5-mini", "0.0001")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "Nothing is asked for; send a task"),
        ({"role": "studnt"}, "did you mean student"),
        ({"text": "xyzzy"}, "No model is described by 'xyzzy'"),
        ({"text": "x" * 301}, "q has 301 characters; at most 300"),
    ],
)
def test_question_without_an_answer_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ask(**asked)


def test_words_that_describe_no_model_are_reported() -> None:
    asked = ask(text="picture of a theremin")["asked"]

    assert (asked["words"], asked["unknown_words"]) == (["picture"], ["theremin"])


@pytest.mark.parametrize(
    "forms",
    ["edit edits editing edited", "explore exploration exploring", "cheap cheaper cheapest"],
)
def test_forms_of_a_word_are_the_same(forms: str) -> None:
    assert len({stem(word) for word in forms.split()}) == 1


# --- Typical orders -------------------------------------------------------------------------------


def test_every_task_has_a_typical_order() -> None:
    assert typical_orders().keys() == TASKS.keys()


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)
def test_typical_order_is_charged_as_it_is_priced(entry: CatalogEntry) -> None:
    typical = typical_nanos(entry, ENTRIES.get)

    if not entry.price:
        steps = ("pocket-speech", "pocket-talking")
        assert typical == sum(typical_nanos(ENTRIES[name], ENTRIES.get) or 0 for name in steps)
        return
    assert typical == charge(entry.selling_price, typical_usage(entry, entry.task)).total_nanos
    assert typical > 0


# --- What entries say of themselves ---------------------------------------------------------------


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)
def test_shipped_entry_says_for_whom_and_why(entry: CatalogEntry) -> None:
    assert entry.tier
    assert entry.roles
    assert entry.why
    assert entry.why.endswith(".")
    assert ". " not in entry.why, "one sentence"


EXAMPLES = [(entry, example) for entry in CATALOG for example in entry.examples]


@pytest.mark.parametrize(("entry", "example"), EXAMPLES, ids=lambda v: getattr(v, "name", ""))
def test_example_is_accepted(entry: CatalogEntry, example: dict[str, Any]) -> None:
    if entry.workflow is None:
        assert prepare(entry, parse(entry.task, example)).limits.requests == 1
        return
    models = StepModels(
        entry=ENTRIES.__getitem__,
        priced=lambda name: (0, ENTRIES[name].selling_price),
        own=entry.selling_price,
    )
    assert plan(entry, WorkflowSubmission(example), models, prefix="").bill.total_nanos


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)
def test_words_of_examples_are_in_the_vocabulary(entry: CatalogEntry) -> None:
    if not known_words(entry):
        return
    assert len(entry.examples) >= 3, "a refusal shows three"
    for example in entry.examples:
        assert check_understood(entry, example, prefix="") == (), example
