"""``tollgate try``: a model at several precisions and batch sizes, before its entry is changed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import click
import msgspec

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import Catalog, Slo
from gateway.commands.planning.trial_process import TrialFailed, run_trial
from gateway.commands.planning.trial_subject import TrialSubject, find_trial_subject
from gateway.commands.terminal import (
    Usd,
    example,
    json_option,
    print_json,
    print_rows,
    read_settings,
)
from gateway.ledger.expenses import ExpenseRates
from gateway.performance import missed
from gateway.plan.hardware import PRECISIONS
from gateway.pricing import NANOS_PER_USD, parse_usd
from workers.contract.trials import (
    ReferenceAnswer,
    TrialAgreement,
    TrialOrder,
    TrialReference,
    TrialRun,
)

DTYPES: Final = "bfloat16,int8"
BATCHES: Final = "1,8"
TRIED: Final = (*PRECISIONS, "int4")
"""Precisions; int4 is of weights that are stored in four bits."""
OUTPUT_TOKENS: Final = 64
BATCH_MAX: Final = 1024
_MILLION: Final = 1_000_000


class TrialRowView(TypedDict):
    """One precision and batch size. ``problem`` is why there are no figures; times are medians."""

    dtype: str
    batch: int
    requests: int
    device: str | None
    load_seconds: float | None
    first_ms: float | None
    """Time to first token, or to first audio."""
    tpot_ms: float | None
    total_ms: float | None
    tokens_per_second: float | None
    results_per_second: float | None
    goodput: float | None
    """Share of requests within all targets of the entry; null without targets."""
    usd_per_million_tokens: str | None
    usd_per_result: str | None
    agreement: float | None
    """Share of tokens that agree with the reference."""
    difference: float | None
    """Mean difference of pictures from those of the reference, as a share of the whole range."""
    problem: str | None


class TrialView(TypedDict):
    object: Literal["trial"]
    model: str
    task: str
    reference: str
    slo: dict[str, Any] | None
    data: list[TrialRowView]


class Listed(click.ParamType[tuple[Any, ...]]):
    """Values separated by commas, without repetitions."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(self._read(one.strip()) for one in str(value).split(",")))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _dtype(text: str) -> str:
    if text not in TRIED:
        raise ValueError(f"{text!r} is not a precision; known are {', '.join(TRIED)}")
    return text


def _batch(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= BATCH_MAX:
        raise ValueError(f"{text!r} is not a batch size; use 1 to {BATCH_MAX}")
    return int(text)


@click.command(
    "try",
    epilog=example(
        "tollgate try pocket-chat --dtypes float32,int8 --batch 1,8",
        "tollgate try /models/qwen3-8b --dtypes bfloat16,int8,fp8 --batch 1,8,32 --price 3.20",
        "tollgate try /models/qwen2.5-vl-7b --picture receipt.png --prompts questions.txt",
    ),
)
@click.argument("model")
@click.option(
    "--dtypes",
    type=Listed("DTYPE,…", _dtype),
    default=DTYPES,
    show_default=True,
    help="Precisions to try.",
)
@click.option(
    "--batch",
    "batches",
    type=Listed("NUMBER,…", _batch),
    default=BATCHES,
    show_default=True,
    help="Numbers of requests that run together.",
)
@click.option(
    "--reference",
    type=click.Choice(TRIED),
    help="Precision to compare with.  [default: the entry's, or that of the weights]",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File of prompts, one on each line.  [default: the entry's examples]",
)
@click.option(
    "--picture",
    "pictures",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Picture that each conversation has; for several, repeat it.",
)
@click.option(
    "--output",
    "output_tokens",
    type=click.IntRange(1),
    default=OUTPUT_TOKENS,
    show_default=True,
    help="Tokens of an answer.",
)
@click.option("--context", type=click.IntRange(2), help="Context in tokens.")
@click.option("--device", help="Device to use: auto, cpu, cuda or one such as cuda:1.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option(
    "--gpu-hour-usd",
    "--price",
    type=Usd(),
    help="Price of a device hour in USD.  [default: gpu_hours of the catalog, "
    "TOLLGATE_GPU_HOUR_USD]",
)
@json_option
def try_command(
    model: str,
    dtypes: tuple[str, ...],
    batches: tuple[int, ...],
    reference: str | None,
    prompts: Path | None,
    pictures: tuple[Path, ...],
    output_tokens: int,
    context: int | None,
    device: str | None,
    threads: int | None,
    gpu_hour_usd: str | None,
    as_json: bool,
) -> None:
    """Load a model at several precisions, and measure speed, goodput, cost and agreement.

    MODEL is an entry of the catalog that runs here, or a checkpoint directory. Each precision runs
    in a process of its own; the catalog and the workers are not touched. Agreement is the share of
    tokens of the reference's greedy answers that a precision chooses, too, after the same tokens.
    Exits with 1 if nothing could be measured.
    """
    settings = read_settings()
    try:
        catalog = load_catalog(settings.catalog)
    except FileNotFoundError:
        catalog = None
    subject = find_trial_subject(model, catalog, settings.catalog, context=context, device=device)
    rates = _rates(catalog, settings.gpu_hour_nanos, gpu_hour_usd)
    lines = prompts.read_text(encoding="utf-8").splitlines() if prompts is not None else []
    texts = [line.strip() for line in lines if line.strip()]
    if prompts is not None and not texts:
        raise ValueError(f"{prompts} has no prompts")
    chosen = reference or subject.reference
    files = tuple(path.read_bytes() for path in pictures)
    found = _run(
        subject,
        chosen,
        dtypes,
        batches,
        inputs=subject.inputs(texts, output_tokens, len(files)),
        files=files,
        output_tokens=output_tokens,
        threads=threads,
    )
    slo = subject.entry.slo
    view: TrialView = {
        "object": "trial",
        "model": subject.name,
        "task": subject.task,
        "reference": chosen,
        "slo": None if slo is None else slo.model_dump(exclude_none=True),
        "data": [row for one in found for row in trial_rows(one, slo, rates)],
    }
    for one in found:
        if one.agreement is not None and one.agreement.problem is not None:
            click.echo(f"{one.dtype} was not compared: {one.agreement.problem}", err=True)
    if as_json:
        print_json(view)
    else:
        _print(view)
    if all(row["problem"] is not None for row in view["data"]):
        raise SystemExit(1)


def _rates(catalog: Catalog | None, hour_nanos: int | None, given: str | None) -> ExpenseRates:
    if given is not None:
        return ExpenseRates(hour_nanos=parse_usd(given))
    return ExpenseRates(hours={} if catalog is None else catalog.gpu_hours, hour_nanos=hour_nanos)


@dataclass(slots=True)
class TriedPrecision:
    """What was measured at one precision."""

    dtype: str
    runs: list[TrialRun] = field(default_factory=list)
    agreement: TrialAgreement | None = None
    answers: tuple[ReferenceAnswer, ...] | None = None
    """Answers of the reference itself."""


def _run(
    subject: TrialSubject,
    reference: str,
    dtypes: Sequence[str],
    batches: tuple[int, ...],
    *,
    inputs: tuple[dict[str, Any], ...],
    files: tuple[bytes, ...],
    output_tokens: int,
    threads: int | None,
) -> list[TriedPrecision]:
    """Try the reference first, with the smallest batch alone if it is not asked for."""
    found: list[TriedPrecision] = []
    answers: tuple[ReferenceAnswer, ...] | None = None
    for dtype in dict.fromkeys((reference, *dtypes)):
        spec = subject.spec
        order = TrialOrder(
            msgspec.structs.replace(spec, options={**spec.options, "dtype": dtype}),
            batches if dtype in dtypes else (min(batches),),
            inputs,
            output_tokens,
            None if dtype == reference else answers or (),
            files,
        )
        click.echo(f"{dtype} …", err=True)
        found.append(tried := TriedPrecision(dtype))
        try:
            for report in run_trial(order, threads=threads):
                match report:
                    case TrialRun():
                        tried.runs.append(report)
                    case TrialReference(made):
                        answers = made
                    case TrialAgreement():
                        tried.agreement = report
        except TrialFailed as error:
            done = {run.batch for run in tried.runs}
            tried.runs += [
                TrialRun(batch, problem=str(error)) for batch in order.batches if batch not in done
            ]
    return found


def trial_rows(tried: TriedPrecision, slo: Slo | None, rates: ExpenseRates) -> list[TrialRowView]:
    """Return a row for each batch size."""
    agreement = tried.agreement or TrialAgreement()
    return [
        {
            **_figures(run, slo, rates),
            "dtype": tried.dtype,
            "agreement": (
                round(agreement.equal / agreement.compared, 4) if agreement.compared else None
            ),
            "difference": agreement.difference,
        }
        for run in tried.runs
    ]


def _figures(run: TrialRun, slo: Slo | None, rates: ExpenseRates) -> TrialRowView:
    requests, hour = len(run.timings), rates.hour_of(run.device)
    paid = Fraction(run.seconds) * hour / 3600 if hour is not None and requests else None
    tokens = run.output_tokens
    good = sum(missed(slo, timings) is None for timings in run.timings) if slo is not None else 0
    return {
        "dtype": "",
        "batch": run.batch,
        "requests": requests,
        "device": run.device or None,
        "load_seconds": round(run.load_seconds, 2) if requests else None,
        "first_ms": _median_ms([timings.first_token_us for timings in run.timings]),
        "tpot_ms": _median_ms([timings.per_token_us for timings in run.timings]),
        "total_ms": _median_ms([timings.total_us for timings in run.timings]),
        "tokens_per_second": round(tokens / run.seconds, 1) if tokens else None,
        "results_per_second": round(requests / run.seconds, 3) if requests else None,
        "goodput": round(good / requests, 4) if slo is not None and requests else None,
        "usd_per_million_tokens": (
            None if paid is None or not tokens else _usd(paid * _MILLION / tokens)
        ),
        "usd_per_result": None if paid is None else _usd(paid / requests),
        "agreement": None,
        "difference": None,
        "problem": run.problem,
    }


def _median_ms(values_us: Sequence[int]) -> float | None:
    measured = [value for value in values_us if value]
    return round(statistics.median(measured) / 1000, 2) if measured else None


def _usd(nanos: Fraction) -> str:
    """Format with four digits that count, since results of small models cost next to nothing."""
    usd = float(nanos / NANOS_PER_USD)
    return f"{usd:.4f}" if usd >= 0.01 else f"{usd:.4g}"


def _print(view: TrialView) -> None:
    click.echo(f"{view['model']} ({view['task']}), compared with {view['reference']}:\n")
    is_text = view["task"] == "text-generation"
    print_rows(view["data"], _text_cells if is_text else _media_cells, False)
    for row in view["data"]:
        if row["problem"] is not None:
            click.echo(f"\n{row['dtype']}, batch {row['batch']}: {row['problem']}")


def _text_cells(row: TrialRowView) -> dict[str, Any]:
    return {
        "dtype": row["dtype"],
        "batch": row["batch"],
        "TTFT ms": row["first_ms"],
        "TPOT ms": row["tpot_ms"],
        "tokens/s": row["tokens_per_second"],
        "goodput": _percent(row["goodput"]),
        "USD per million tokens": row["usd_per_million_tokens"],
        "tokens that agree": _percent(row["agreement"]),
    }


def _media_cells(row: TrialRowView) -> dict[str, Any]:
    total = row["total_ms"]
    return {
        "dtype": row["dtype"],
        "batch": row["batch"],
        "seconds a result": None if total is None else f"{total / 1000:.3g}",
        "results/s": row["results_per_second"],
        "goodput": _percent(row["goodput"]),
        "USD a result": row["usd_per_result"],
        "difference": _percent(row["difference"]),
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"
