"""Checks that route, limits and price of a catalog entry are consistent. Pure.

The invariant: an entry that passes can be quoted, and every usage that running it measures has a
price. All conflicts are reported, each with its place in the entry.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, Final, TypeAlias

from gateway.catalog import workflow as chains
from gateway.catalog.tasks import PICTURES, TASKS, Modality, Task, input_conflicts
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
    from gateway.catalog.schema import CatalogEntry, PriceLine, Upstream

Place: TypeAlias = tuple[str | int, ...]
Conflict: TypeAlias = tuple[Place, str]

_SUFFICIENT_UNITS: Final[Mapping[Modality, tuple[tuple[Unit, ...], ...]]] = {
    # Units that must have a price, by the task's output; each group suffices.
    "text": (("request",), ("input_token", "output_token"), ("gpu_second",)),
    "embedding": (("request",), ("input_token",), ("gpu_second",)),
    "ranking": (("request",), ("input_token",), ("gpu_second",)),
    "transcript": (("request",), ("audio_second",), ("gpu_second",)),
    "image": (("request",), ("image",), ("step",), ("gpu_second",)),
    "video": (("request",), ("video_second",), ("step",), ("gpu_second",)),
    "audio": (("request",), ("audio_second",), ("character",), ("step",), ("gpu_second",)),
}
_OPTIONAL: Final[Mapping[Modality, tuple[Unit, ...]]] = {"text": ("cached_input_token",)}

_BOUND: Final[Mapping[Unit, str]] = {
    # Limits that bound a quantity. Without them, no hold could cover it.
    "video_second": "seconds",
    "audio_second": "seconds",
    "step": "steps",
    "gpu_second": "gpu_seconds",
}
_VISUAL_LIMITS: Final = (
    *("sources", "side", "side_step", "pixels"),
    *("scale", "characters", "steps", "guidance"),
)
_LIMITS: Final[Mapping[Modality, tuple[str, ...]]] = {
    "text": ("context_tokens", "output_tokens", "choices", "template_tokens", *PICTURES),
    "embedding": ("context_tokens", "template_tokens", "inputs", "dimensions"),
    "ranking": ("context_tokens", "template_tokens", "inputs"),
    "transcript": ("seconds",),
    "image": ("images", *_VISUAL_LIMITS),
    "video": ("seconds", "fps", *_VISUAL_LIMITS),
    "audio": ("seconds", "characters", "steps"),
}
_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
_DEFAULTS: Final[Mapping[Modality, tuple[str, ...]]] = {
    "text": _SAMPLING,
    "image": ("quality", "steps", "guidance", "strength", "scheduler"),
    "video": ("quality", "steps", "guidance", "scheduler", "seconds", "fps"),
    "audio": ("seconds",),
}
_PLAIN: Final = ("text", "embedding", "ranking", "transcript")
"""Outputs without a size, quality or resolution."""
_UNREPORTED: Final[Mapping[Unit, str]] = {"gpu_second": "GPU time", "step": "steps"}
"""Units that HTTP upstreams do not report, with their names in conflicts."""
_QUANTITY_MAX: Final = 1_000_000_000
"""Assumed maximum of quantities without a limit: the highest limit that the schema accepts."""
_WORKFLOW_UNITS: Final[Mapping[Modality, tuple[tuple[Unit, ...], ...]]] = {
    # Units that a workflow's own price may count; each group suffices. The steps bound them.
    "text": (("request",), ("input_token", "output_token")),
    "embedding": (("request",), ("input_token",)),
    "ranking": (("request",), ("input_token",)),
    "transcript": (("request",), ("audio_second",)),
    "image": (("request",), ("image",)),
    "video": (("request",), ("video_second",)),
    "audio": (("request",), ("audio_second",)),
}
BY_STEPS: Final = "steps"
"""Value of ``price`` for a workflow that is priced by its steps."""
_NOT_OF_WORKFLOWS: Final = frozenset(
    {
        "also",
        "input",
        "engine",
        "checkpoint",
        "options",
        "upstream",
        "cost",
        "canary",
        "batch_discount",
        "default_parameters",
        "sizes",
        "qualities",
        "schedulers",
        "resolutions",
        "voices",
    }
)
_SAME: Final = (
    *("input", "limits", "sizes", "qualities", "schedulers", "resolutions"),
    *("known_adapters", "known_controls", "known_references", "known_voices", "known_languages"),
)
"""What an entry and its versions have in common, so that each can run every request."""
_GUIDES: Final = ("control", "reference")  # only the engine's options can list them
_LIMITS_OF_ALL: Final = ("gpu_seconds", "timeout_s")


class Conflicts(ValueError):
    """All inconsistencies of one entry."""

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
    yield from _shares(entry)
    yield from _tasks(entry)
    yield from _limits(entry)
    yield from input_conflicts(entry)
    yield from _defaults(entry)
    yield from _visual(entry)
    if entry.price:
        yield from _coverage(entry)
    else:
        yield ("price",), "only a workflow can be priced by its steps; give a list of prices"
    yield from _conditions(entry.price)
    yield from _cost(entry)
    yield from _applicable(entry)
    yield from _bookable(entry)
    yield from _batches(entry)


def route(*, engine: bool, upstream: bool) -> Iterator[Conflict]:
    """Yield a conflict unless there is exactly one route."""
    if not engine and not upstream:
        yield (), "no route; give `engine` (run here) or `upstream` (sent elsewhere)"
    if engine and upstream:
        yield (), "two routes; give either `engine` or `upstream`"


def misfits(entries: Sequence[CatalogEntry]) -> Iterator[Conflict]:
    """Find workflows whose steps the other entries cannot do, and versions that cannot stand in."""
    models = {entry.name: entry for entry in entries}
    for index, entry in enumerate(entries):
        if entry.workflow is not None:
            for place, message in chains.misfits(entry, models):
                yield ("models", index, *place), message
        for name in entry.canary:
            if (misfit := _unlike(entry, models.get(name))) is not None:
                yield ("models", index, "canary", name), misfit


def _unlike(entry: CatalogEntry, version: CatalogEntry | None) -> str | None:
    """Return why a version cannot run every request that its entry accepts."""
    if version is None:
        return "unknown model; name an entry of the catalog"
    if version is entry:
        return "the entry itself, which runs the rest anyway"
    if version.workflow is not None or version.canary:
        return "a workflow, or an entry with versions of its own, cannot be a version"
    if {version.task, *version.also} != {entry.task, *entry.also}:
        tasks = ", ".join((version.task, *version.also))
        return f"it does {tasks}, not {', '.join((entry.task, *entry.also))}"
    differing = [name for name in _SAME if getattr(version, name) != getattr(entry, name)]
    if differing:
        return f"it must accept the same requests, but differs in {', '.join(differing)}"
    if version.upstream is not None:
        for line in entry.price:
            if line.unit in _UNREPORTED:
                return f"upstreams do not report {_UNREPORTED[line.unit]}, which {entry.name} sells"
    return None


def _workflow(entry: CatalogEntry) -> Iterator[Conflict]:
    """Find conflicts in a workflow's entry: it has a price and a timeout, but no route, and the
    models of its steps have everything else."""
    assert entry.workflow is not None
    for name in sorted(entry.model_fields_set & _NOT_OF_WORKFLOWS):
        yield (name,), "not allowed in a workflow; set it for the models of its steps"
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
                f"the price of this workflow must be per {accepted}, or `price: {BY_STEPS}`",
            )
    if units and not any(units.issuperset(group) for group in enough):
        accepted = ", or ".join(" and ".join(group) for group in enough)
        yield ("price",), f"this does not cover {entry.task}; price its {accepted}"
    if entry.minimum is not None and not entry.price:
        yield ("minimum",), "a workflow that is priced by its steps has no minimum"
    yield from _conditions(entry.price)


_ENGINE_TASKS: Final = frozenset(("text-embedding", "rerank", "speech-to-text"))
"""Tasks for which no dialect of an upstream has a request."""


def _route_details(entry: CatalogEntry) -> Iterator[Conflict]:
    if entry.engine not in (None, "echo") and entry.checkpoint is None:
        yield (), f"the engine {entry.engine} needs `checkpoint`, the directory of its weights"
    if entry.upstream is None:
        return
    if entry.checkpoint is not None:
        yield ("checkpoint",), "only an engine loads a checkpoint, not an upstream"
    for task in _ENGINE_TASKS.intersection(_all_tasks(entry)):
        yield ("upstream",), f"no dialect of upstreams has the task {task}; run it by an `engine`"
    if entry.upstream.command is not None:
        yield from _command(entry.upstream)
    elif (entry.upstream.url is None) != bool(entry.upstream.endpoints):
        yield ("upstream",), "give either `url` or `endpoints`, where the model is served"
    elif entry.upstream.gpus or entry.upstream.environment:
        yield ("upstream",), "`gpus` and `environment` are those of a `command`"
    if entry.upstream.endpoints and entry.upstream.dialect != "openai":
        yield ("upstream", "endpoints"), "only the dialect openai may have several endpoints"
    if entry.upstream.dialect == "gmi" and entry.upstream.credential is None:
        yield ("upstream",), "the dialect gmi needs `credential`, the variable with its key"


def _command(upstream: Upstream) -> Iterator[Conflict]:
    """Find what does not fit a service that the worker itself starts."""
    command = upstream.command or ""
    if upstream.url is not None or upstream.endpoints:
        yield (
            ("upstream",),
            "a `command` is called on its own port; leave out `url` and `endpoints`",
        )
    if upstream.dialect != "openai" or upstream.credential is not None:
        yield ("upstream",), "a `command` is called in the dialect openai, without a credential"
    if "{port}" not in command:
        yield ("upstream", "command"), "the command must contain {port}, on which it has to listen"
    try:
        shlex.split(command)
    except ValueError as error:
        yield ("upstream", "command"), f"the command cannot be split into words: {error}"


def _shares(entry: CatalogEntry) -> Iterator[Conflict]:
    """Find shares that add up to nothing sensible."""
    if (total := sum(entry.canary.values())) > 100:
        yield ("canary",), f"the shares add up to {total:g} %; at most 100 is left to give"
    if entry.upstream is None:
        return
    for tier in sorted({one.tier for one in entry.upstream.endpoints}):
        weighted = [one.weight is not None for one in entry.upstream.endpoints if one.tier == tier]
        if any(weighted) and not all(weighted):
            message = f"of the endpoints of tier {tier}, give all a `weight` or none"
            yield ("upstream", "endpoints"), message
        elif weighted == [True]:
            message = f"tier {tier} has one endpoint, which receives every call; leave out `weight`"
            yield ("upstream", "endpoints"), message


def _tasks(entry: CatalogEntry) -> Iterator[Conflict]:
    seen = {entry.task}
    for index, task in enumerate(entry.also):
        if task in seen:
            yield ("also", index), f"{task} is listed twice"
        seen.add(task)


def _limits(entry: CatalogEntry) -> Iterator[Conflict]:
    made = {TASKS[task].makes for task in _all_tasks(entry)}
    known = [*dict.fromkeys(name for kind in sorted(made) for name in _LIMITS[kind])]
    for name in sorted(entry.limits.model_fields_set):
        if name not in known and name not in _LIMITS_OF_ALL:
            accepted = ", ".join([*known, *_LIMITS_OF_ALL])
            yield ("limits", name), f"not a limit of {entry.task}; accepted: {accepted}"
    output, context = entry.limits.output_tokens, entry.limits.context_tokens
    if "text" in made and output is None:
        yield ("limits",), "text-generation needs limits.output_tokens to bound its price"
    if output is not None and context is not None and output > context:
        message = f"{output} is more than context_tokens ({context}), which counts the prompt too"
        yield ("limits", "output_tokens"), message
    if entry.slo is not None and not entry.slo.model_fields_set:
        yield ("slo",), "it is empty; give ttft_ms, tpot_ms, first_audio_ms or total_ms"
    if "text" not in made and entry.slo is not None:
        for name in sorted(entry.slo.model_fields_set & {"ttft_ms", "tpot_ms"}):
            yield ("slo", name), "only text models produce tokens; use total_ms"
    if "audio" not in made and entry.slo is not None and entry.slo.first_audio_ms is not None:
        yield ("slo", "first_audio_ms"), "only speech and music models produce audio"


def _defaults(entry: CatalogEntry) -> Iterator[Conflict]:
    made = {TASKS[task].makes for task in _all_tasks(entry)}
    known = [name for kind in sorted(made) for name in _DEFAULTS.get(kind, ())]
    given = entry.default_parameters.model_fields_set
    for name in sorted(given.difference(known)):
        accepted = ", ".join(known) or "none"
        message = f"not a default of {entry.task}; accepted: {accepted}"
        yield ("default_parameters", name), message
    for name in sorted(given & {"steps", "guidance", "seconds", "fps"}):
        default, most = getattr(entry.default_parameters, name), getattr(entry.limits, name)
        if default is not None and most is not None and default > most:
            yield ("default_parameters", name), f"{default} is more than limits.{name} ({most})"


def _visual(entry: CatalogEntry) -> Iterator[Conflict]:
    """Find references to qualities and schedulers that the entry does not list."""
    if not {TASKS[task].makes for task in _all_tasks(entry)} & {"image", "video"}:
        for name in ("sizes", "qualities", "schedulers"):
            if getattr(entry, name):
                yield (name,), f"{entry.task} produces no image or video; leave it out"
        return
    for name in ("side", "side_step", "pixels"):
        if entry.sizes and getattr(entry.limits, name) is not None:
            yield ("limits", name), "`sizes` lists all supported sizes; leave this out"
    default = entry.default_parameters
    if default.quality is not None and default.quality not in entry.qualities:
        message = f"{default.quality!r} is not one of its qualities: {_listed(entry.qualities)}"
        yield ("default_parameters", "quality"), message
    named: list[tuple[Place, str | None]] = [(("default_parameters",), default.scheduler)]
    for name, quality in entry.qualities.items():
        named.append((("qualities", name), quality.scheduler))
        if quality.steps and entry.limits.steps and quality.steps > entry.limits.steps:
            message = f"{quality.steps} is more than limits.steps ({entry.limits.steps})"
            yield ("qualities", name, "steps"), message
    for place, scheduler in named:
        if scheduler is not None and scheduler not in entry.schedulers:
            message = f"{scheduler!r} is not one of its schedulers: {_listed(entry.schedulers)}"
            yield (*place, "scheduler"), message


def _coverage(entry: CatalogEntry) -> Iterator[Conflict]:
    """Find usage that the price does not cover, and units that are never measured."""
    units = {line.unit for line in entry.price}
    for task in _all_tasks(entry):
        makes = TASKS[task].makes
        enough = _SUFFICIENT_UNITS[makes]
        countable = {unit for group in enough for unit in group} | {*_OPTIONAL.get(makes, ())}
        for index, line in enumerate(entry.price):
            if line.unit not in countable:
                accepted = ", ".join(sorted(countable))
                message = f"{task} is not measured in {line.unit}s; accepted: {accepted}"
                yield ("price", index, "unit"), message
        if not any(units.issuperset(group) for group in enough):
            accepted = ", or ".join(" and ".join(group) for group in enough)
            yield ("price",), f"this does not cover {task}; price its {accepted}"
    for index, line in enumerate(entry.price):
        limit = _BOUND.get(line.unit)
        if limit and getattr(entry.limits, limit) is None:
            message = f"a price per {line.unit} needs limits.{limit} to bound it"
            yield ("price", index, "unit"), message
        if line.unit in _UNREPORTED and entry.upstream is not None:
            message = f"upstreams do not report {_UNREPORTED[line.unit]}; use another unit"
            yield ("price", index, "unit"), message


def _cost(entry: CatalogEntry) -> Iterator[Conflict]:
    """Find costs of what is never measured, and of a model that runs here."""
    if not entry.cost:
        return
    if entry.upstream is None:
        yield ("cost",), "only an upstream has a cost; that of a device is in gpu_hours"
        return
    countable = {
        unit
        for task in _all_tasks(entry)
        for group in _SUFFICIENT_UNITS[TASKS[task].makes]
        for unit in (*group, *_OPTIONAL.get(TASKS[task].makes, ()))
    }
    for index, line in enumerate(entry.cost):
        if line.unit in _UNREPORTED or line.unit not in countable:
            accepted = ", ".join(sorted(countable - _UNREPORTED.keys()))
            message = f"{entry.task} is not measured in {line.unit}s; accepted: {accepted}"
            yield ("cost", index, "unit"), message
    yield from _conditions(entry.cost, "cost")


def _conditions(lines: Sequence[PriceLine], field: str = "price") -> Iterator[Conflict]:
    """Find usage of a unit for which there is not exactly one most specific line."""
    seen: set[tuple[object, ...]] = set()
    for index, line in enumerate(lines):
        key = (line.unit, *sorted(line.when.items()))
        if key in seen:
            condition = f" when {_describe(line.when)}" if line.when else ""
            yield (field, index), f"{line.unit} already has a price{condition}"
        seen.add(key)
    for index, line in enumerate(lines):
        if line.when and (line.unit,) not in seen:
            seen.add((line.unit,))
            message = f"{line.unit} has only conditional prices; add a line without `when`"
            yield (field, index, "when"), f"{message} for everything else"
    for (_, one), (index, other) in combinations(enumerate(lines), 2):
        both = {**one.when, **other.when}
        if (
            one.unit == other.unit
            and one.when.keys() != other.when.keys()
            and len(one.when) == len(other.when)
            and all(both[name] == value for name, value in one.when.items())
            and (one.unit, *sorted(both.items())) not in seen
        ):
            both_apply = f"{_describe(one.when)} and {_describe(other.when)} can both apply"
            yield (field, index, "when"), f"{both_apply}; add a line for both together"


def _applicable(entry: CatalogEntry) -> Iterator[Conflict]:
    """Find conditions that never hold, so that their lines would silently never apply."""
    only_text = all(TASKS[task].makes in _PLAIN for task in _all_tasks(entry))
    known: Mapping[str, Collection[str]] = {
        "size": entry.sizes,
        "quality": entry.qualities,
        "resolution": entry.resolutions,
        "control": entry.known_controls,
        "reference": entry.known_references,
    }
    for index, line in enumerate(entry.price):
        if line.when and only_text:
            message = f"{entry.task} has no {min(line.when)}; leave `when` out"
            yield ("price", index, "when"), message
            continue
        for name, value in sorted(line.when.items()):
            if (known[name] or name in _GUIDES) and value not in known[name]:
                plural = "qualities" if name == "quality" else f"{name}s"
                message = f"{value!r} is not one of its {plural}: {_listed(known[name])}"
                yield ("price", index, "when", name), message


def _bookable(entry: CatalogEntry) -> Iterator[Conflict]:
    """Find a price at which the largest request exceeds the amounts that can be booked."""
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
            f"the largest request would cost more than {most} USD, the largest amount that can "
            "be booked; lower the price or the limits",
        )
    except UnpricedUsage:
        # Another check reports the missing limit or price.
        return


def _batches(entry: CatalogEntry) -> Iterator[Conflict]:
    if not entry.batch and "batch_discount" in entry.model_fields_set:
        yield ("batch_discount",), "the model is not sold in batches (`batch: false`)"
    if entry.batch:
        try:
            discounted(entry.selling_price, Fraction(entry.batch_discount))
        except Unbookable:
            yield (
                ("batch_discount",),
                f"less {entry.batch_discount} the price cannot be written exactly in nano-dollars; "
                "use fewer decimals, or `batch: false`",
            )


def _all_tasks(entry: CatalogEntry) -> tuple[Task, ...]:
    return tuple(dict.fromkeys((entry.task, *entry.also)))


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "it has none"


def _describe(when: Mapping[str, str]) -> str:
    return " and ".join(f"{name}={value}" for name, value in sorted(when.items()))
