"""Proposes the catalog entry of a checkpoint directory. Reads configurations, but no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, get_args

from gateway.catalog.schema import Engine
from gateway.catalog.tasks import TASKS, Task, makes
from gateway.ledger.expenses import ExpenseRates
from gateway.plan.hardware import Device
from gateway.plan.planning import make_plan
from gateway.plan.question import PlanQuestion
from gateway.plan.shapes import Shape, read_config
from gateway.plan.subjects import Subject, find_subject
from gateway.plan.views import PlannedDeviceView, PlanView
from gateway.pricing import format_usd, parse_usd

MARKUP: Final = 2
"""Proposed price, as a multiple of the cost that a plan expects."""
CONTEXT: Final = 32_768
"""Largest context that is proposed, in tokens."""
OUTPUT: Final = 4096
SLOTS: Final = 8
SECONDS: Final = 30
CHARACTERS: Final = 4096
_MILLION: Final = 1_000_000
_ENGINES: Final[Mapping[str, Engine]] = {
    "text-generation": "llm",
    "text-embedding": "embedding",
    "rerank": "rerank",
    "image-upscale": "upscale",
    "video-upscale": "upscale",
    "talking-head": "talking",
    "text-to-speech": "speech",
    "voice-clone": "speech",
    "speech-to-text": "transcription",
}
_LIMITS: Final[Mapping[str, dict[str, Any]]] = {
    "image": {"images": 4, "sources": 1, "steps": 100},
    "video": {"seconds": 10, "steps": 100},
    "audio": {"seconds": SECONDS, "characters": CHARACTERS},
}
_READ_PICTURES: Final = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""Architectures whose conversations can contain pictures."""
PICTURES: Final = 4
PICTURE_TOKENS: Final = 1280
"""Proposed tokens of a picture: a megapixel, at 28x28 pixels a token."""
_LARGE: Final = ("musicgen", "bark", "dia", "csm")
"""Models of audio that are worth less precision."""
_ELSEWHERE: Final = (
    "if no engine here serves it, run it with vLLM or another server and add an `upstream` entry "
    "(docs/guides/upstream.md)"
)


class NotServed(Exception):
    """No engine serves the directory; the message says why and what to do instead."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """An entry without a price, and the plan of its model on this machine."""

    fields: dict[str, Any]
    plan: PlanView

    @property
    def here(self) -> PlannedDeviceView | None:
        """The first GPU of this machine, otherwise its CPU."""
        return next(iter(self.plan["devices"]), None)


def propose(
    path: Path,
    *,
    name: str,
    checkpoint: str,
    task: Task | None,
    devices: Sequence[Device],
    rates: ExpenseRates,
) -> Proposal:
    """Read a directory. ``checkpoint`` is its path as the entry names it.

    Raise ``NotServed`` if no engine serves it.
    """
    try:
        found = find_subject(str(path), (), root=Path(), directories=True)
        subject = Subject(name, task or _task(found, path), found.model)
        plan = make_plan(subject, PlanQuestion(dtype=_dtype(subject)), devices, rates=rates)
    except (ValueError, LookupError) as error:
        raise NotServed(f"{error}; {_ELSEWHERE}") from None
    kind, proposal = subject.task, Proposal({}, plan)
    options: dict[str, Any] = {"dtype": _dtype(subject)}
    if isinstance(subject.model, Shape) and subject.model.packed_bits == 4:
        options["dtype"] = "auto"  # the engine keeps weights of four bits
    if isinstance(subject.model, Shape) and kind == "text-generation":
        here = proposal.here
        fitting = here["text"]["sequences"] if here is not None and here["text"] else SLOTS
        options["slots"] = max(1, min(SLOTS, fitting))
    limits = _limits(subject)
    if sees := kind == "text-generation" and reads_pictures(path):
        limits |= picture_limits(limits["context_tokens"])
    fields = {
        "name": name,
        "task": kind,
        "input": ["text", "image"] if sees else [],
        "engine": _engine(subject),
        "checkpoint": checkpoint,
        "options": options,
        "limits": limits,
    }
    return Proposal({key: value for key, value in fields.items() if value}, plan)


def _task(subject: Subject, path: Path) -> Task:
    """Return the task of a directory; a decoder can also be one for embeddings."""
    if not isinstance(subject.model, Shape):
        return subject.task
    embeds = _architecture(path).endswith(("Model", "ForMaskedLM"))
    return "text-embedding" if embeds or (path / "modules.json").is_file() else subject.task


def reads_pictures(path: Path) -> bool:
    """Whether the model of a directory can read pictures in conversations."""
    return _architecture(path) in _READ_PICTURES


def picture_limits(context: int) -> dict[str, int]:
    """Return the limits of an entry's pictures, in a context of so many tokens."""
    return {
        "sources": PICTURES,
        "source_tokens": min(PICTURE_TOKENS, max(1, context // 4)),
    }


def _architecture(path: Path) -> str:
    architectures = read_config(path / "config.json").get("architectures") or [""]
    return str(architectures[0])


def _engine(subject: Subject) -> str:
    if subject.task == "text-to-music":
        return "music" if isinstance(subject.model, Shape) else "speech"
    engine = _ENGINES.get(subject.task, "diffusion")
    assert engine in get_args(Engine)
    return engine


def _dtype(subject: Subject) -> str:
    model, stored = subject.model, subject.model.precision
    if _engine(subject) in ("speech", "talking", "upscale") and (
        isinstance(model, Shape) or model.pipeline not in _LARGE
    ):
        # Small networks, which gain little from less; not all of their operations have bfloat16.
        return "float32"
    # float16 is slow on processors and can overflow where bfloat16 does not.
    return "float32" if stored == "float32" else "bfloat16"


def _limits(subject: Subject) -> dict[str, Any]:
    model, made = subject.model, TASKS[subject.task].makes
    if subject.task == "text-generation" and isinstance(model, Shape):
        context = min(model.context or OUTPUT, CONTEXT)
        return {"context_tokens": context, "output_tokens": min(OUTPUT, max(1, context // 2))}
    limits = dict(_LIMITS.get(made, {}))
    if subject.task in ("talking-head", "video-upscale", "image-upscale"):
        return {key: value for key, value in limits.items() if key in ("seconds", "images")}
    if not TASKS[subject.task].reads.count("image"):
        limits.pop("sources", None)
    return limits


# --- Price ----------------------------------------------------------------------------------------


def propose_price(proposal: Proposal) -> list[dict[str, Any]]:
    """Return twice the expected cost of the plan; nothing if that is not known."""
    here, task = proposal.here, proposal.plan["task"]
    if here is None:
        return []
    if (text := here["text"]) is not None:
        costs = {"input_token": text["usd_per_million_input_tokens"]}
        if task != "text-embedding":
            costs["output_token"] = text["usd_per_million_output_tokens"]
        known = {unit: cost for unit, cost in costs.items() if cost is not None}
        if len(known) < len(costs):
            return []
        return [
            {"unit": unit, "amount": _amount(cost["expected"]), "per": _MILLION}
            for unit, cost in known.items()
        ]
    result = here["result"]
    if result is None or result["cost_usd"] is None:
        return []
    made = makes(task)
    if made == "image":
        return [{"unit": "image", "amount": _amount(result["cost_usd"])}]
    request: Any = proposal.plan["request"]
    seconds = Fraction(request["seconds"])
    return [{"unit": f"{made}_second", "amount": _amount(result["cost_usd"], seconds)}]


def _amount(cost_usd: str, share: Fraction = Fraction(1)) -> str:
    """Return the price of one unit of ``share`` in what costs so much: at least a nano-dollar."""
    nanos = Fraction(parse_usd(cost_usd) * MARKUP) / share
    return format_usd(max(1, -(-nanos.numerator // nanos.denominator)))
