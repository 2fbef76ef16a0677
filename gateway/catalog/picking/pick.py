"""Picks models for a wish: a task, a role, words and a budget. Plain points, no model.

The points of an entry are the sum of

- ``ROLE`` if it is meant for the role that was asked for;
- for each word, its weight in the entry's texts: ``PURPOSE``, ``REASON`` or ``MENTION``;
- ``DEMO`` if it is a demonstration, which does not compete on quality.

More points come first, then the lower price of a typical order, then the name. ``best`` is the
first within the budget, ``cheaper`` the first that costs less, ``better`` the first of a higher
tier, also above the budget, and ``today`` the first that runs on this installation now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

from gateway.catalog.availability import availability
from gateway.catalog.listing import order_view
from gateway.catalog.picking.typical import Find, typical_nanos
from gateway.catalog.picking.words import (
    PURPOSE,
    REASON,
    TEXT_MAX,
    roles_meant,
    stems,
    tasks_meant,
    weight,
)
from gateway.catalog.schema import TIERS, CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.catalog.views import LeftOutView, PickedView, PickView, WishView
from gateway.checks.suggestions import did_you_mean
from gateway.errors import InvalidRequest
from gateway.pricing import format_usd
from workers.contract.announcements import Announcement

ROLE: Final = PURPOSE + 1
DEMO: Final = -REASON
RANKED_MAX: Final = 5
LEFT_OUT_MAX: Final = 20
RESULTS: Final = 1000
"""Results of the what-if."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What somebody looks for. Without a task or words, the role alone decides."""

    task: Task | None = None
    tasks: frozenset[Task] = frozenset()
    """The tasks that the words are about; empty if any can be meant."""
    roles: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    """Words by their stems, each found in the texts of at least one entry."""
    unknown_words: tuple[str, ...] = ()
    budget_nanos: int | None = None
    """Maximum price of one typical result."""
    available: bool = False
    """Whether it must run now."""
    language: str | None = None
    license: str | None = None
    seconds_max: float | None = None
    """Maximum measured duration; what was not measured is left out."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    entry: CatalogEntry
    task: Task
    points: int
    nanos: int
    """Price of a typical order."""
    matched: tuple[str, ...]

    @property
    def order(self) -> tuple[int, int, str]:
        return -self.points, self.nanos, self.entry.name.lower()

    @property
    def tier(self) -> int:
        return -1 if self.entry.tier is None else TIERS.index(self.entry.tier)

    @property
    def is_demo(self) -> bool:
        return self.entry.tier == "demo"


def read_wish(
    entries: Sequence[CatalogEntry],
    *,
    task: str | None = None,
    role: str | None = None,
    text: str | None = None,
    budget_nanos: int | None = None,
    available: bool = False,
    language: str | None = None,
    license: str | None = None,
    seconds_max: float | None = None,
) -> Wish:
    """Read what somebody asks for, in the words of ``entries``. ``task`` is a task's name or words.

    Raise ``InvalidRequest`` if nothing is asked for, or nothing of it is known.
    """
    for name, given in (("task", task), ("role", role), ("q", text)):
        if given is not None and len(given) > TEXT_MAX:
            message = f"{name} has {len(given)} characters; at most {TEXT_MAX} are accepted."
            raise InvalidRequest("invalid_value", message, param=name)
    known_roles = sorted({each for entry in entries for each in entry.roles})
    roles = roles_meant(role, known_roles) if role else ()
    if role and not roles:
        hint = did_you_mean(role, known_roles)
        raise InvalidRequest("invalid_value", f"role is {role!r}; {hint}.", param="role")
    named = _task_named(task)
    asked = stems(f"{'' if named else task or ''} {text or ''}")
    words = {
        each: word for each, word in asked.items() if any(weight(entry, each) for entry in entries)
    }
    if not (named or roles or words):
        said = " ".join(asked.values())
        found = f"No model is described by {said!r}" if said else "Nothing is asked for"
        raise InvalidRequest(
            "invalid_value",
            f"{found}; send a task ({', '.join(get_args(Task))}), a role "
            f"({', '.join(known_roles)}) or words for what the model is to do.",
            param="q" if text else "task",
        )
    return Wish(
        task=named,
        tasks=frozenset({named}) if named else tasks_meant(words),
        roles=roles,
        words=words,
        unknown_words=tuple(word for each, word in asked.items() if each not in words),
        budget_nanos=budget_nanos,
        available=available,
        language=language,
        license=license,
        seconds_max=seconds_max,
    )


def pick(
    entries: Sequence[CatalogEntry],
    announcements: Sequence[Announcement],
    wish: Wish,
    *,
    find: Find,
    seconds: Mapping[str, float] | None = None,
    runs_here: Callable[[CatalogEntry], bool] | None = None,
    results: int = RESULTS,
    sizes: Mapping[str, int] | None = None,
) -> PickView:
    """Pick models. ``results`` are those of the what-if, and ``sizes`` replace quantities of the
    typical order; ``seconds`` are measured durations by model; ``runs_here`` replaces the check of
    availability where no announcements are known."""

    def is_available(entry: CatalogEntry) -> bool:
        if runs_here is not None:
            return runs_here(entry)
        return availability(entry, announcements) is None

    def view(one: _Candidate, relation: str) -> PickedView:
        entry = one.entry
        reason = (entry.why or entry.description or entry.name).rstrip(".")
        return {
            "name": entry.name,
            "task": one.task,
            "tier": entry.tier,
            "why": f"{reason}; {relation}.",
            "typical_price": format_usd(one.nanos),
            "typical_order": order_view(entry, one.task, sizes),
            "what_if": {"results": results, "cost": format_usd(one.nanos * results)},
            "available": is_available(entry),
            "measured_seconds": (seconds or {}).get(entry.name),
            "points": one.points,
            "matched": list(one.matched),
        }

    found = sorted(_candidates(entries, wish, find, sizes), key=lambda one: one.order)
    misses = {
        one.entry.name: why
        for one in found
        if (why := _miss(one.entry, wish, is_available, (seconds or {}).get(one.entry.name)))
    }
    ranked = [one for one in found if one.entry.name not in misses]
    budget = wish.budget_nanos
    within = [one for one in ranked if budget is None or one.nanos <= budget]
    best = within[0] if within else None
    cheaper = better = None
    if best is not None:
        comparable = [one for one in ranked if _serves_alike(one, best, wish)]
        cheaper = next((one for one in comparable if one.nanos < best.nanos), None)
        better = next((one for one in comparable if one.tier > best.tier), None)
    elif ranked:
        better = min(ranked, key=lambda one: one.nanos)
    left_out: list[LeftOutView] = [
        {
            "name": one.entry.name,
            "typical_price": format_usd(one.nanos),
            "why": misses.get(one.entry.name) or _above(one, budget or 0),
        }
        for one in found
        if one not in within
    ]
    today = _stand_in(entries, best or better, is_available, find, sizes)
    return {
        "object": "catalog.pick",
        "asked": _asked_view(wish),
        "best": view(best, _fit(best, wish)) if best else None,
        "cheaper": view(cheaper, _less(cheaper, best)) if best and cheaper else None,
        "better": view(better, _more(better, best, budget)) if better else None,
        "today": view(today, "it runs on this gateway") if today else None,
        "ranked": [view(one, _fit(one, wish)) for one in within[:RANKED_MAX]],
        "left_out": left_out[:LEFT_OUT_MAX],
        "message": None if best is not None else _nothing(ranked, budget, misses),
    }


def _candidates(
    entries: Sequence[CatalogEntry], wish: Wish, find: Find, sizes: Mapping[str, int] | None
) -> list[_Candidate]:
    found = []
    for entry in entries:
        tasks = (entry.task, *entry.also)
        task = next((each for each in tasks if not wish.tasks or each in wish.tasks), None)
        if task is None:
            continue
        points = {word: weight(entry, each) for each, word in wish.words.items()}
        matched = tuple(word for word, weighs in points.items() if weighs)
        has_role = any(role in entry.roles for role in wish.roles)
        # Without a task, an answer matches one of the words, or if there are none the role.
        if not (wish.task or matched or (has_role and not wish.words)):
            continue
        nanos = typical_nanos(entry, find, task, sizes)
        if nanos is not None:
            total = sum(points.values()) + ROLE * has_role + DEMO * (entry.tier == "demo")
            found.append(_Candidate(entry, task, total, nanos, matched))
    return found


def _serves_alike(one: _Candidate, best: _Candidate, wish: Wish) -> bool:
    """Whether a candidate can stand for the best: the same kind of output, and at least half of its
    points. A demonstration stands for demonstrations only."""
    return (
        TASKS[one.task].makes == TASKS[best.task].makes
        and (one.is_demo <= best.is_demo)
        and (bool(wish.task) or 2 * one.points >= best.points)
    )


def _stand_in(
    entries: Sequence[CatalogEntry],
    wanted: _Candidate | None,
    is_available: Callable[[CatalogEntry], bool],
    find: Find,
    sizes: Mapping[str, int] | None,
) -> _Candidate | None:
    """Return the local model that does the task of the wanted one, or else makes the same."""
    if wanted is None:
        return None
    makes = TASKS[wanted.task].makes
    local = [
        _Candidate(entry, task, wanted.task == task, nanos, ())
        for entry in entries
        if entry.upstream is None and is_available(entry)
        for task in (entry.task, *entry.also)
        if TASKS[task].makes == makes
        and (nanos := typical_nanos(entry, find, task, sizes)) is not None
    ]
    return min(local, key=lambda one: one.order, default=None)


def _task_named(text: str | None) -> Task | None:
    wanted = "-".join(text.lower().replace("_", " ").split()) if text else None
    return next((task for task in get_args(Task) if task == wanted), None)


# --- Sentences ------------------------------------------------------------------------------------


def _fit(one: _Candidate, wish: Wish) -> str:
    roles = [f"it suits the role {role}" for role in wish.roles if role in one.entry.roles]
    words = [f"it matches {', '.join(one.matched)}"] if one.matched else []
    parts = [*roles, *words] or [f"it does {one.task}"]
    return f"{' and '.join(parts)}, at ${format_usd(one.nanos)} a result"


def _less(one: _Candidate, best: _Candidate) -> str:
    return f"${format_usd(best.nanos - one.nanos)} less a result than {best.entry.name}"


def _more(one: _Candidate, best: _Candidate | None, budget: int | None) -> str:
    above = ""
    if budget is not None and one.nanos > budget:
        above = _above(one, budget)
    if best is None:
        return above
    extra = one.nanos - best.nanos
    change = f"${format_usd(abs(extra))} {'more' if extra >= 0 else 'less'} a result"
    tiers = f"of the tier {one.entry.tier}, for {change} than {best.entry.name}"
    return f"{tiers}, {above}" if above else tiers


def _miss(
    entry: CatalogEntry,
    wish: Wish,
    is_available: Callable[[CatalogEntry], bool],
    seconds: float | None,
) -> str | None:
    """Return which condition an entry does not meet, other than the budget."""
    if wish.available and not is_available(entry):
        return "not available now"
    if wish.language is not None and wish.language not in entry.known_languages:
        return f"does not list the language {wish.language}"
    if wish.license is not None and entry.license != wish.license:
        return f"its licence is {entry.license}" if entry.license else "its licence is not stated"
    if wish.seconds_max is not None and (seconds is None or seconds > wish.seconds_max):
        return "its speed was not measured" if seconds is None else f"takes {seconds:g} s"
    return None


def _above(one: _Candidate, budget: int) -> str:
    return f"${format_usd(one.nanos - budget)} above the budget"


def _nothing(ranked: Sequence[_Candidate], budget: int | None, misses: Mapping[str, str]) -> str:
    if not ranked and misses:
        return "No model meets all conditions."
    if not ranked or budget is None:
        return "No model fits."
    nearest = min(ranked, key=lambda one: one.nanos)
    return (
        f"Nothing costs at most ${format_usd(budget)} a result; the nearest is "
        f"{nearest.entry.name} at ${format_usd(nearest.nanos)}."
    )


def _asked_view(wish: Wish) -> WishView:
    return {
        "task": wish.task,
        "roles": list(wish.roles),
        "words": list(wish.words.values()),
        "unknown_words": list(wish.unknown_words),
        "budget": None if wish.budget_nanos is None else format_usd(wish.budget_nanos),
    }
