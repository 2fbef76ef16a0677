"""What must fit together in a catalog entry: route, limits and price. Pure.

The invariant: what passes here can be quoted, and whatever running it measures has a price. Every
conflict is found, each with its place in the entry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, Final, TypeAlias

from gateway.catalog import workflow as chains
from gateway.catalog.tasks import TASKS, Modality, Task
from gateway.pricing import (
    NANOS_MAX,
    Unbookable,
    Unit,
    UnpricedUsage,
    discounted,
    format_usd,
    quote,
)
from workers.contract.jobs import Usage

if TYPE_CHECKING:
    from gateway.catalog.schema import CatalogEntry, PriceLine

Place: TypeAlias = tuple[str | int, ...]
Conflict: TypeAlias = tuple[Place, str]

_SUFFICIENT_UNITS: Final[Mapping[Modality, tuple[tuple[Unit, ...], ...]]] = {
    # What must be priced for a task that makes this; each group suffices.
    "text": (("request",), ("input_token", "output_token"), ("gpu_second",)),
    "embedding": (("request",), ("input_token",), ("gpu_second",)),
    "image": (("request",), ("image",), ("step",), ("gpu_second",)),
    "video": (("request",), ("video_second",), ("step",), ("gpu_second",)),
    "audio": (("request",), ("audio_second",), ("character",), ("step",), ("gpu_second",)),
}
_OPTIONAL: Final[Mapping[Modality, tuple[Unit, ...]]] = {"text": ("cached_input_token",)}

_BOUND: Final[Mapping[Unit, str]] = {
    # The limit without which a quantity has no upper bound, so that nothing could be held for it.
    "video_second": "seconds",
    "audio_second": "seconds",
    "step": "steps",
    "gpu_second": "gpu_seconds",
}
_VISUAL_LIMITS: Final = (
    "sources",
    "side",
    "side_step",
    "pixels",
    "scale",
    "characters",
    "steps",
    "guidance",
)
_LIMITS: Final[Mapping[Modality, tuple[str, ...]]] = {
    "text": ("context_tokens", "output_tokens", "choices", "template_tokens"),
    "embedding": ("context_tokens", "template_tokens", "inputs", "dimensions"),
    "image": ("images", *_VISUAL_LIMITS),
    "video": ("seconds", "fps", *_VISUAL_LIMITS),
    "audio": ("seconds", "characters", "steps"),
}
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_DEFAULTS: Final[Mapping[Modality, tuple[str, ...]]] = {
    "text": _SAMPLING,
    "image": ("quality", "steps", "guidance", "strength", "scheduler"),
    "video": ("quality", "steps", "guidance", "scheduler", "seconds", "fps"),
    "audio": ("seconds",),
}
_UNREPORTED: Final[Mapping[Unit, str]] = {"gpu_second": "GPU time", "step": "steps"}
"""What nobody says who serves a model over HTTP."""
_QUANTITY_MAX: Final = 1_000_000_000
"""What counts as the most of something that has no limit: the highest limit there can be."""
_WORKFLOW_UNITS: Final[Mapping[Modality, tuple[tuple[Unit, ...], ...]]] = {
    # What a price of a workflow's own may count; each group suffices. Its steps bound them.
    "text": (("request",), ("input_token", "output_token")),
    "embedding": (("request",), ("input_token",)),
    "image": (("request",), ("image",)),
    "video": (("request",), ("video_second",)),
    "audio": (("request",), ("audio_second",)),
}
BY_STEPS: Final = "steps"
"""In the place of a price: what the steps of a workflow cost."""
_NOT_OF_WORKFLOWS: Final = frozenset(
    {
        "also",
        "engine",
        "checkpoint",
        "options",
        "upstream",
        "batch_discount",
        "default_parameters",
        "sizes",
        "qualities",
        "schedulers",
        "resolutions",
        "voices",
    }
)
_LIMITS_OF_ALL: Final = ("gpu_seconds", "timeout_s")


class Conflicts(ValueError):
    """Everything in one entry that does not fit together."""

    def __init__(self, found: Sequence[Conflict]) -> None:
        super().__init__("; ".join(message for _, message in found))
        self.found = tuple(found)


def conflicts(entry: CatalogEntry) -> Iterator[Conflict]:
    """Find what does not fit together in an entry whose fields are right by themselves."""
    if entry.workflow is not None:
        yield from _workflow(entry)
        return
    yield from route(engine=entry.engine is not None, upstream=entry.upstream is not None)
    yield from _route_details(entry)
    yield from _tasks(entry)
    yield from _limits(entry)
    yield from _defaults(entry)
    yield from _visual(entry)
    if entry.price:
        yield from _coverage(entry)
    else:
        yield ("price",), "only a workflow costs what its steps cost; give a list of prices"
    yield from _conditions(entry.price)
    yield from _applicable(entry)
    yield from _bookable(entry)
    yield from _batches(entry)


def route(*, engine: bool, upstream: bool) -> Iterator[Conflict]:
    """A request must have one place to go to."""
    if not engine and not upstream:
        yield (), "it has no route; give `engine` (run here) or `upstream` (sent elsewhere)"
    if engine and upstream:
        yield (), "it has two routes; give either `engine` or `upstream`"


def repeated_names(entries: Sequence[CatalogEntry]) -> Iterator[Conflict]:
    """A name stands for one model. Names are matched by case, so ``Veo3`` and ``veo3`` differ."""
    return repeated([(entry.name, entry.aliases) for entry in entries])


def repeated(names: Sequence[tuple[object, object]]) -> Iterator[Conflict]:
    """The same of names and aliases that may be wrong in other ways as well."""
    first: dict[str, int] = {}
    for index, (name, _) in enumerate(names):
        if not isinstance(name, str):
            continue
        if name in first:
            message = f"{name!r} is taken already, by models[{first[name]}]; names must differ"
            yield ("models", index, "name"), message
        first.setdefault(name, index)
    for index, (_, aliases) in enumerate(names):
        for place, alias in enumerate(aliases if isinstance(aliases, list | tuple) else ()):
            if not isinstance(alias, str):
                continue
            if alias in first:
                message = (
                    f"{alias!r} is taken already, by models[{first[alias]}]; names must differ"
                )
                yield ("models", index, "aliases", place), message
            first.setdefault(alias, index)


def misfits(entries: Sequence[CatalogEntry]) -> Iterator[Conflict]:
    """Find workflows whose steps the other entries cannot do."""
    models = {entry.name: entry for entry in entries}
    for index, entry in enumerate(entries):
        if entry.workflow is not None:
            for place, message in chains.misfits(entry, models):
                yield ("models", index, *place), message


def _workflow(entry: CatalogEntry) -> Iterator[Conflict]:
    """A workflow is where its steps run, and has no more of its own than a price and a time."""
    assert entry.workflow is not None
    for name in sorted(entry.model_fields_set & _NOT_OF_WORKFLOWS):
        yield (name,), "a workflow has none of its own; its steps' models do"
    for name in sorted(entry.limits.model_fields_set - {"timeout_s"}):
        yield ("limits", name), "a workflow has only limits.timeout_s; its models have the others"
    for place, message in chains.conflicts(entry.workflow):
        yield ("workflow", *place), message
    if entry.slo is not None and entry.slo.model_fields_set - {"total_ms"}:
        yield ("slo",), "a workflow can promise total_ms only"
    enough = _WORKFLOW_UNITS[TASKS[entry.task].makes]
    units = {line.unit for line in entry.price}
    for index, line in enumerate(entry.price):
        if all(line.unit not in group for group in enough):
            accepted = ", ".join(sorted({unit for group in enough for unit in group}))
            yield (
                ("price", index, "unit"),
                f"the price of this workflow is per {accepted}, or `price: {BY_STEPS}`",
            )
    if units and not any(units.issuperset(group) for group in enough):
        accepted = ", or ".join(" and ".join(group) for group in enough)
        yield ("price",), f"this does not cover {entry.task}; price its {accepted}"
    if entry.minimum is not None and not entry.price:
        yield ("minimum",), "what costs what its steps cost has no minimum of its own"
    yield from _conditions(entry.price)


def _route_details(entry: CatalogEntry) -> Iterator[Conflict]:
    if entry.engine not in (None, "echo") and entry.checkpoint is None:
        yield (), f"the engine {entry.engine} needs `checkpoint`: the directory of its weights"
    if entry.upstream is None:
        return
    if entry.checkpoint is not None:
        yield ("checkpoint",), "only an engine loads a checkpoint, not an upstream"
    if (entry.upstream.url is None) != bool(entry.upstream.endpoints):
        yield ("upstream",), "give either `url` or `endpoints`: where the model is served"
    if entry.upstream.endpoints and entry.upstream.dialect != "openai":
        yield ("upstream", "endpoints"), "only the dialect openai may have several endpoints"
    if entry.upstream.dialect == "gmi" and entry.upstream.credential is None:
        yield (
            ("upstream",),
            "the dialect gmi needs `credential`: the name of the variable with its key",
        )


def _tasks(entry: CatalogEntry) -> Iterator[Conflict]:
    seen = {entry.task}
    for index, task in enumerate(entry.also):
        if task in seen:
            yield ("also", index), f"{task} is named already"
        seen.add(task)


def _limits(entry: CatalogEntry) -> Iterator[Conflict]:
    made = {TASKS[task].makes for task in _all_tasks(entry)}
    known = [*dict.fromkeys(name for kind in sorted(made) for name in _LIMITS[kind])]
    for name in sorted(entry.limits.model_fields_set):
        if name not in known and name not in _LIMITS_OF_ALL:
            accepted = ", ".join([*known, *_LIMITS_OF_ALL])
            yield ("limits", name), f"{entry.task} has no such limit; accepted: {accepted}"
    output, context = entry.limits.output_tokens, entry.limits.context_tokens
    if "text" in made and output is None:
        yield ("limits",), "text-generation needs limits.output_tokens, or nothing bounds its price"
    if output is not None and context is not None and output > context:
        message = f"{output} is more than context_tokens ({context}), which counts the prompt too"
        yield ("limits", "output_tokens"), message
    if entry.slo is not None and not entry.slo.model_fields_set:
        yield ("slo",), "it promises nothing; give ttft_ms, tpot_ms, first_audio_ms or total_ms"
    if "text" not in made and entry.slo is not None:
        for name in sorted(entry.slo.model_fields_set & {"ttft_ms", "tpot_ms"}):
            yield ("slo", name), "only what makes text has tokens; promise total_ms"
    if "audio" not in made and entry.slo is not None and entry.slo.first_audio_ms is not None:
        yield ("slo", "first_audio_ms"), "only what speaks or plays has a first sound"


def _defaults(entry: CatalogEntry) -> Iterator[Conflict]:
    made = {TASKS[task].makes for task in _all_tasks(entry)}
    known = [name for kind in sorted(made) for name in _DEFAULTS.get(kind, ())]
    given = entry.default_parameters.model_fields_set
    for name in sorted(given.difference(known)):
        accepted = ", ".join(known) or "none"
        message = f"{entry.task} takes no such default; accepted: {accepted}"
        yield ("default_parameters", name), message
    for name in sorted(given & {"steps", "guidance", "seconds", "fps"}):
        default, most = getattr(entry.default_parameters, name), getattr(entry.limits, name)
        if default is not None and most is not None and default > most:
            yield ("default_parameters", name), f"{default} is more than limits.{name} ({most})"


def _visual(entry: CatalogEntry) -> Iterator[Conflict]:
    """What names a size, a quality or a scheduler must name one that there is."""
    if not {TASKS[task].makes for task in _all_tasks(entry)} & {"image", "video"}:
        for name in ("sizes", "qualities", "schedulers"):
            if getattr(entry, name):
                yield (name,), f"{entry.task} draws nothing; leave it out"
        return
    for name in ("side", "side_step", "pixels"):
        if entry.sizes and getattr(entry.limits, name) is not None:
            yield ("limits", name), "`sizes` lists all that can be had; leave this out"
    default = entry.default_parameters
    if default.quality is not None and default.quality not in entry.qualities:
        message = f"{default.quality!r} is none of its qualities: {_listed(entry.qualities)}"
        yield ("default_parameters", "quality"), message
    named: list[tuple[Place, str | None]] = [(("default_parameters",), default.scheduler)]
    for name, quality in entry.qualities.items():
        named.append((("qualities", name), quality.scheduler))
        if quality.steps and entry.limits.steps and quality.steps > entry.limits.steps:
            message = f"{quality.steps} is more than limits.steps ({entry.limits.steps})"
            yield ("qualities", name, "steps"), message
    for place, scheduler in named:
        if scheduler is not None and scheduler not in entry.schedulers:
            message = f"{scheduler!r} is none of its schedulers: {_listed(entry.schedulers)}"
            yield (*place, "scheduler"), message


def _coverage(entry: CatalogEntry) -> Iterator[Conflict]:
    """Refuse a price that leaves what is measured unpaid, or that counts what never is."""
    units = {line.unit for line in entry.price}
    for task in _all_tasks(entry):
        makes = TASKS[task].makes
        enough = _SUFFICIENT_UNITS[makes]
        countable = {unit for group in enough for unit in group} | {*_OPTIONAL.get(makes, ())}
        for index, line in enumerate(entry.price):
            if line.unit not in countable:
                accepted = ", ".join(sorted(countable))
                message = f"{task} is not counted in {line.unit}s; accepted: {accepted}"
                yield ("price", index, "unit"), message
        if not any(units.issuperset(group) for group in enough):
            accepted = ", or ".join(" and ".join(group) for group in enough)
            yield ("price",), f"this does not cover {task}; price its {accepted}"
    for index, line in enumerate(entry.price):
        limit = _BOUND.get(line.unit)
        if limit and getattr(entry.limits, limit) is None:
            message = f"a price per {line.unit} needs limits.{limit}, or nothing bounds it"
            yield ("price", index, "unit"), message
        if line.unit in _UNREPORTED and entry.upstream is not None:
            message = f"an upstream reports no {_UNREPORTED[line.unit]}; price what it reports"
            yield ("price", index, "unit"), message


def _conditions(lines: Sequence[PriceLine]) -> Iterator[Conflict]:
    """For every usage of a unit exactly one line must be the most specific that applies."""
    seen: set[tuple[object, ...]] = set()
    for index, line in enumerate(lines):
        key = (line.unit, *sorted(line.when.items()))
        if key in seen:
            said = f" when {_said(line.when)}" if line.when else ""
            yield ("price", index), f"{line.unit} has a price already{said}"
        seen.add(key)
    for index, line in enumerate(lines):
        if line.when and (line.unit,) not in seen:
            seen.add((line.unit,))
            message = f"{line.unit} is priced only under conditions; add a line without `when`"
            yield ("price", index, "when"), f"{message} for everything else"
    for (_, one), (index, other) in combinations(enumerate(lines), 2):
        both = {**one.when, **other.when}
        if (
            one.unit == other.unit
            and one.when.keys() != other.when.keys()
            and len(one.when) == len(other.when)
            and all(both[name] == value for name, value in one.when.items())
            and (one.unit, *sorted(both.items())) not in seen
        ):
            message = f"{_said(one.when)} and {_said(other.when)} can both apply; add a line for "
            yield ("price", index, "when"), f"{message}both together"


def _applicable(entry: CatalogEntry) -> Iterator[Conflict]:
    """Refuse a condition that never holds, so that its line would quietly never apply."""
    only_text = all(TASKS[task].makes in ("text", "embedding") for task in _all_tasks(entry))
    known: Mapping[str, Collection[str]] = {
        "size": entry.sizes,
        "quality": entry.qualities,
        "resolution": entry.resolutions,
    }
    for index, line in enumerate(entry.price):
        if line.when and only_text:
            message = f"{entry.task} has no {min(line.when)}; leave `when` out"
            yield ("price", index, "when"), message
            continue
        for name, value in sorted(line.when.items()):
            if known[name] and value not in known[name]:
                plural = "qualities" if name == "quality" else f"{name}s"
                message = f"{value!r} is none of its {plural}: {_listed(known[name])}"
                yield ("price", index, "when", name), message


def _bookable(entry: CatalogEntry) -> Iterator[Conflict]:
    """Refuse a price at which the largest request could not be quoted at all."""
    limits = entry.limits
    milliseconds = round((limits.seconds or 0) * 1000)
    largest = Usage(
        requests=1,
        input_tokens=(limits.context_tokens or _QUANTITY_MAX) * (limits.inputs or 1),
        output_tokens=(limits.output_tokens or 0) * (limits.choices or 1),
        images=limits.images or 1,
        video_ms=milliseconds,
        audio_ms=milliseconds,
        characters=limits.characters or _QUANTITY_MAX,
        steps=(limits.steps or 0) * (limits.images or 1),
        gpu_us=round((limits.gpu_seconds or 0) * 1_000_000),
    )
    try:
        quote(entry.selling_price, largest)
    except Unbookable:
        most = format_usd(NANOS_MAX)
        yield (
            ("price",),
            f"the largest request would cost more than the {most} USD that can be "
            "booked; lower the price or the limits",
        )
    except UnpricedUsage:
        # A limit or a price is missing, which is said where it is missing.
        return


def _batches(entry: CatalogEntry) -> Iterator[Conflict]:
    if not entry.batch and "batch_discount" in entry.model_fields_set:
        yield ("batch_discount",), "it is not sold in batches (`batch: false`)"
    if entry.batch:
        try:
            discounted(entry.selling_price, Fraction(entry.batch_discount))
        except Unbookable:
            yield (
                ("batch_discount",),
                f"less {entry.batch_discount} the price cannot be written exactly; use fewer "
                "decimals, or `batch: false`",
            )


def _all_tasks(entry: CatalogEntry) -> tuple[Task, ...]:
    return tuple(dict.fromkeys((entry.task, *entry.also)))


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "it has none"


def _said(when: Mapping[str, str]) -> str:
    return " and ".join(f"{name}={value}" for name, value in sorted(when.items()))
