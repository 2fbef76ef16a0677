"""Upstreams: the endpoints of all workers together, each by its host and tier. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypedDict
from urllib.parse import urlsplit

from gateway.catalog.schema import CatalogEntry
from gateway.operations.running.workers import EndpointView, WorkerView

UpstreamState: TypeAlias = Literal["up", "paused", "down", "partly", "unknown"]


class CredentialView(TypedDict):
    """A variable with a credential. ``is_set``: whether a live worker has it; None: no worker."""

    name: str
    is_set: bool | None


class UpstreamView(TypedDict):
    """An endpoint, over all models and workers. ``unknown``: no worker calls it.

    ``p95_ms`` is that of the slowest model at the slowest worker.
    """

    object: Literal["upstream"]
    host: str
    tier: int
    state: UpstreamState
    models: list[str]
    models_down: list[str]
    workers: list[str]
    in_flight: int
    limit: int
    failures: int
    down_since: str | None
    next_call_at: str | None
    calls: int
    p95_ms: float | None
    errors: dict[str, int]
    credentials: list[CredentialView]
    reasons: list[str]


def list_upstreams(
    entries: Sequence[CatalogEntry], workers: Sequence[WorkerView]
) -> list[UpstreamView]:
    """Return the endpoints of the catalog and of live workers: first those that need attention."""
    live = [each for each in workers if each["state"] != "silent"]
    seen: defaultdict[tuple[str, int], list[tuple[str, EndpointView]]] = defaultdict(list)
    for worker in live:
        for endpoint in worker["endpoints"]:
            seen[endpoint["host"], endpoint["tier"]].append((worker["name"], endpoint))
    places: defaultdict[tuple[str, int], list[CatalogEntry]] = defaultdict(list)
    for entry in entries:
        for place in dict.fromkeys((each.host, each.tier) for each in _places(entry)):
            places[place].append(entry)
    views = [
        _view(place, seen.get(place, ()), places.get(place, ()), live)
        for place in {**seen, **places}
    ]
    order = ("down", "partly", "paused", "unknown", "up")
    return sorted(views, key=lambda view: (order.index(view["state"]), view["host"], view["tier"]))


class _Place(NamedTuple):
    host: str
    tier: int
    credential: str | None


def _places(entry: CatalogEntry) -> Iterator[_Place]:
    """Yield the endpoints of an entry; those of an upstream may leave out its own defaults."""
    upstream = entry.upstream
    if upstream is not None:
        for each in upstream.endpoints:
            yield _Place(
                urlsplit(each.url).netloc, each.tier, each.credential or upstream.credential
            )
        if upstream.url is not None:
            yield _Place(urlsplit(upstream.url).netloc, 0, upstream.credential)


def _view(
    place: tuple[str, int],
    seen: Sequence[tuple[str, EndpointView]],
    entries: Sequence[CatalogEntry],
    live: Sequence[WorkerView],
) -> UpstreamView:
    states = [endpoint for _, endpoint in seen]
    down = sorted({each["model"] for each in states if each["state"] == "down"})
    up = {each["model"] for each in states if each["state"] != "down"}
    errors: Counter[str] = Counter()
    for each in states:
        errors.update(each["errors"])
    slowest = [each["p95_ms"] for each in states if each["p95_ms"] is not None]
    since = [each["down_since"] for each in states if each["down_since"]]
    moments = [each["next_call_at"] for each in states if each["next_call_at"]]
    models = sorted({*(entry.name for entry in entries), *(each["model"] for each in states)})
    return {
        "object": "upstream",
        "host": place[0],
        "tier": place[1],
        "state": _state(states, down, up),
        "models": models,
        "models_down": down,
        "workers": sorted({name for name, _ in seen}),
        "in_flight": sum(each["in_flight"] for each in states),
        "limit": sum(each["limit"] for each in states),
        "failures": max((each["failures"] for each in states), default=0),
        "down_since": min(since, default=None),
        "next_call_at": min(moments, default=None),
        "calls": sum(each["calls"] for each in states),
        "p95_ms": max(slowest, default=None),
        "errors": dict(errors.most_common()),
        "credentials": _credentials(place, entries, live),
        "reasons": _reasons(entries, live),
    }


def _state(states: Sequence[EndpointView], down: Sequence[str], up: set[str]) -> UpstreamState:
    if not states:
        return "unknown"
    if down:
        return "partly" if up else "down"
    return "paused" if any(each["state"] == "paused" for each in states) else "up"


def _credentials(
    place: tuple[str, int], entries: Iterable[CatalogEntry], live: Sequence[WorkerView]
) -> list[CredentialView]:
    """Return the variables with the endpoint's credentials, and whether workers have them.

    A worker that lacks one announces the model as unavailable for that reason.
    """
    found: dict[str, bool | None] = {}
    for entry in entries:
        for endpoint in _places(entry):
            name = endpoint.credential
            if name is None or endpoint[:2] != place:
                continue
            models = [
                model for each in live for model in each["models"] if model["name"] == entry.name
            ]
            lacking = [each for each in models if _lacks(each["reason"], name)]
            is_set = None if not models else len(lacking) < len(models)
            found[name] = found.get(name) or is_set
    return [{"name": name, "is_set": is_set} for name, is_set in found.items()]


def _lacks(reason: str | None, name: str) -> bool:
    return reason is not None and name in reason and reason.endswith("is not set")


def _reasons(entries: Iterable[CatalogEntry], live: Sequence[WorkerView]) -> list[str]:
    """Return why workers do not serve models of an endpoint, each reason once."""
    names = {entry.name for entry in entries}
    return list(
        dict.fromkeys(
            model["reason"]
            for worker in live
            for model in worker["models"]
            if model["name"] in names and model["reason"]
        )
    )
