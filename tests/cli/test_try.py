"""``tollgate try``: one real trial, its rows, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.catalog.schema import Slo
from gateway.commands.planning.trial_process import TrialFailed, run_trial
from gateway.commands.planning.trial_subject import find_trial_subject
from gateway.commands.planning.try_model import TriedPrecision, trial_rows
from gateway.errors import InvalidRequest
from gateway.ledger.expenses import ExpenseRates
from gateway.up.environment import of_trial
from tests.cli.here import run_here
from tests.workers.llm.pictures import make_pictured, picture
from tests.workers.llm.quantized_files import awq, write_both
from workers.contract.jobs import Timings
from workers.contract.models import ModelSpec
from workers.contract.trials import TrialAgreement, TrialOrder, TrialRun

CHAT = Path(__file__).parents[2] / "workers" / "pocket" / "chat"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLGATE_HOME", str(tmp_path / "home"))


def test_a_directory_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is a hold?\n\nWhat is 12 plus 30?\n")

    done = run_here(
        (
            "try", str(CHAT), "--dtypes", "bfloat16", "--batch", "1", "--output", "4",
            "--prompts", str(prompts), "--context", "256", "--device", "cpu", "--threads", "1",
            "--price", "0.05", "--json",
        ),
        {},
    )  # fmt: skip

    assert done.exit_code == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["task"], made["reference"], made["slo"]) == ("text-generation", "bfloat16", None)
    (row,) = made["data"]
    assert (row["dtype"], row["batch"], row["device"], row["problem"]) == (
        "bfloat16",
        1,
        "cpu",
        None,
    )
    assert row["first_ms"] > 0
    assert row["tpot_ms"] > 0
    assert float(row["usd_per_million_tokens"]) > 0
    assert row["agreement"] is None


def test_rows_have_medians_goodput_cost_and_agreement() -> None:
    timings = tuple(
        Timings(first_token_us=first, per_token_us=20_000, total_us=first + 80_000)
        for first in (10_000, 30_000, 50_000, 400_000)
    )
    run = TrialRun(2, 2.0, 1.5, output_tokens=400, timings=timings, device="NVIDIA H200")
    tried = TriedPrecision("int8", [run, TrialRun(8, problem="no room")])
    tried.agreement = TrialAgreement(compared=200, equal=199)

    good, failed = trial_rows(
        tried,
        Slo(ttft_ms=100, tpot_ms=30),
        ExpenseRates(hours={"H200": 3_600_000_000}),
    )

    assert (good["first_ms"], good["tpot_ms"], good["tokens_per_second"]) == (40.0, 20.0, 200.0)
    assert good["goodput"] == 0.75
    # Two seconds at $0.001 each, for 400 tokens and four results.
    assert good["usd_per_million_tokens"] == "5.0000"
    assert good["usd_per_result"] == "0.0005"
    assert (good["agreement"], failed["agreement"]) == (0.995, 0.995)
    assert (failed["batch"], failed["problem"], failed["requests"]) == (8, "no room", 0)
    assert failed["goodput"] is None


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (("nobody-knows-it",), "neither in the catalog nor a directory", 1),
        (("Veo3",), "Veo3 runs at an upstream", 1),
        (("pocket-talking",), "tollgate plan pocket-talking", 1),
        (("pocket-talking-head",), "try its steps instead: pocket-speech", 1),
        (("pocket-chat", "--dtypes", "int3"), "'int3' is not a precision; known are", 2),
        (("pocket-chat", "--batch", "0"), "'0' is not a batch size; use 1 to 1024", 2),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_line(
    arguments: tuple[str, ...], said: str, status: int
) -> None:
    done = run_here(("try", *arguments), {})

    assert done.exit_code == status
    assert said in done.stderr


def test_a_model_without_a_template_continues_texts(tmp_path: Path) -> None:
    for file in CHAT.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)

    base = find_trial_subject(str(tmp_path), None, Path("none.yaml"), context=None, device=None)
    chat = find_trial_subject(str(CHAT), None, Path("none.yaml"), context=None, device=None)

    assert base.inputs(["once"], 4)[0]["prompts"] == ("once",)
    assert chat.inputs(["once"], 4)[0]["messages"][0]["content"] == "once"
    assert chat.spec.limits["context_tokens"] == 1024


def test_a_conversation_has_pictures_if_the_model_reads_them(tmp_path: Path) -> None:
    looker = make_pictured("qwen2.5vl", tmp_path / "looker")
    subjects = [
        find_trial_subject(str(path), None, Path("none.yaml"), context=None, device=None)
        for path in (looker, CHAT)
    ]

    (asked,) = subjects[0].inputs(["what is this?"], 4, 2)

    assert asked["messages"][0]["parts"] == (0, 1, "what is this?")
    assert subjects[0].spec.limits["source_tokens"] > 0
    with pytest.raises(InvalidRequest, match="image"):
        subjects[1].inputs(["what is this?"], 4, 1)


def test_weights_of_four_bits_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    _, short = write_both("qwen3", tmp_path, awq(32), hidden_size=64, intermediate_size=128)

    subject = find_trial_subject(str(short), None, Path("none.yaml"), context=None, device=None)

    assert subject.reference == "int4"


@pytest.mark.long
def test_pictures_and_four_bits_are_tried_by_the_command(tmp_path: Path) -> None:
    looker = make_pictured("qwen2vl", tmp_path / "looker")
    (tmp_path / "a.png").write_bytes(picture(60, 40))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("what is this?\n")
    _, short = write_both("qwen3", tmp_path, awq(32), hidden_size=64, intermediate_size=128)
    usual = (
        "--batch", "1", "--output", "4", "--prompts", str(prompts), "--context", "512",
        "--device", "cpu", "--threads", "1", "--json",
    )  # fmt: skip

    shown = run_here(
        (
            *("try", str(looker), "--picture", str(tmp_path / "a.png")),
            *("--reference", "float32", "--dtypes", "float32,int8", *usual),
        ),
        {},
    )
    packed = run_here(("try", str(short), "--dtypes", "int4,float32", *usual), {})

    for done, dtypes in ((shown, ["float32", "int8"]), (packed, ["int4", "float32"])):
        assert done.exit_code == 0, done.stderr
        rows = json.loads(done.stdout)["data"]
        assert [row["dtype"] for row in rows] == dtypes
        assert [row["problem"] for row in rows] == [None, None]
        assert rows[1]["agreement"] is not None


def test_a_process_that_fails_is_reported_with_its_last_line() -> None:
    spec = ModelSpec("echo", "text-generation", "echo")

    with pytest.raises(TrialFailed, match=r"ended with 1: ZeroDivisionError"):
        list(run_trial(TrialOrder(spec, (1,), (), 4), threads=None))


def test_the_process_gets_no_secrets() -> None:
    given = {"PATH": "/bin", "HF_TOKEN": "x", "OMP_NUM_THREADS": "4", "STRIPE_API_KEY": "x"}

    found = of_trial(given, threads=2)

    assert found == {"PATH": "/bin", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
