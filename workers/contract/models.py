"""The part of a catalog entry that a worker needs: engine, checkpoint and options, or upstream.

Read from the same ``catalog.yaml`` that the gateway validates and prices; other fields, such as
prices, are ignored. The checks of the gateway (``gateway/catalog``) are stricter and come first, so
an error here means that the worker reads another file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

_SHIPPED: Final = Path(__file__).parents[2]
"""Directory of the installed package, which has the shipped checkpoints."""


class EndpointSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of several endpoints that serve a model."""

    url: str
    model: str | None = None
    credential: str | None = None
    tier: int = 0
    """Fallback level: an endpoint is used only if none of a lower tier accepts work. It may serve
    another model."""
    concurrency: int | None = None
    weight: int | None = None
    """Share of the calls among the endpoints of its tier; without weights, load decides."""


class UpstreamSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model served over HTTP by another service, at one ``url`` or several ``endpoints``."""

    url: str = ""
    """Base URL, such as ``https://api.example.com/v1``."""
    endpoints: tuple[EndpointSpec, ...] = ()
    dialect: str = "openai"
    model: str | None = None
    """Name of the model at the upstream, if it differs."""
    credential: str | None = None
    """Name of the environment variable that contains the key; never the key itself."""
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 60.0
    idle_timeout_s: float = 60.0
    concurrency: int = 64
    """Maximum number of concurrent requests of one worker."""
    command: str | None = None
    """Command by which the worker itself starts the service; ``{port}``, ``{model}`` and ``{gpus}``
    are replaced. It then has no ``url``."""
    ready: str = "/health"
    """Path that answers 2xx once the service of ``command`` is ready."""
    ready_timeout_s: float = 1800.0
    gpus: int = 0
    """Devices of the worker that the service of ``command`` has to itself."""
    environment: dict[str, str] = {}
    """Further variables of ``command``."""

    @property
    def all_endpoints(self) -> tuple[EndpointSpec, ...]:
        """All endpoints, with defaults filled in."""
        return tuple(
            EndpointSpec(
                one.url,
                one.model or self.model,
                one.credential or self.credential,
                one.tier,
                one.concurrency or self.concurrency,
                one.weight,
            )
            for one in self.endpoints or (EndpointSpec(self.url),)
        )

    def usable(self, environ: Mapping[str, str]) -> tuple[EndpointSpec, ...]:
        """Return the endpoints that need no credential or whose credential is set."""
        return tuple(
            each
            for each in self.all_endpoints
            if each.credential is None or environ.get(each.credential)
        )


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The worker's part of a catalog entry; exactly one of ``engine`` and ``upstream`` is set."""

    name: str
    task: str
    engine: str | None = None
    checkpoint: str | None = None
    """Directory of the weights, relative to the catalog's directory."""
    options: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    upstream: UpstreamSpec | None = None
    also: tuple[str, ...] = ()
    """Additional tasks of the model."""
    workflow: Any = None
    """Set for workflows, which no worker runs."""

    @property
    def route(self) -> str:
        """Name of the engine in the registry, or ``upstream``."""
        return self.engine or "upstream"


class _File(msgspec.Struct, frozen=True):
    models: tuple[ModelSpec, ...]


def read_specs(catalog: Path) -> tuple[ModelSpec, ...]:
    """Read all entries of a catalog file except workflows, and make their paths absolute.

    That includes the paths of adapters, control networks, references, draft models and upscalers;
    the latter two can also be named by their catalog entry. Raise ``OSError`` if the file cannot be
    read, ``ValueError`` if it is not a valid catalog.
    """
    try:
        document = yaml.safe_load(catalog.read_text())
        models = msgspec.convert(document, _File).models
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ValueError(f"{catalog}: {error}") from error
    specs = [spec for spec in models if spec.workflow is None]
    root = catalog.resolve().parent
    checkpoints = {spec.name: spec.checkpoint for spec in specs if spec.checkpoint is not None}
    found = []
    for spec in specs:
        options = dict(spec.options)
        guesser = options.get("speculation")
        if isinstance(guesser, dict) and isinstance(named := guesser.get("checkpoint"), str):
            path = locate(root, checkpoints.get(named, named))
            options["speculation"] = {**guesser, "checkpoint": str(path)}
        if isinstance(named := options.get("upscaler"), str):
            options["upscaler"] = str(locate(root, checkpoints.get(named, named)))
        if isinstance(loras := options.get("lora"), list):
            options["lora"] = [_absolute(lora, root) for lora in loras]
        for kind in ("adapters", "controls"):
            if isinstance(listed := options.get(kind), dict):
                options[kind] = {name: _absolute(one, root) for name, one in listed.items()}
        if (reference := options.get("reference")) is not None:
            reference = _absolute(reference, root)
            options["reference"] = _absolute(reference, root, field="image_encoder")
        own = None if spec.checkpoint is None else str(locate(root, spec.checkpoint))
        found.append(msgspec.structs.replace(spec, checkpoint=own, options=options))
    return tuple(found)


def locate(root: Path, named: str) -> Path:
    """Return the path of a checkpoint that a catalog in ``root`` names. Shipped ones, such as
    ``workers/pocket/chat``, are found wherever the catalog is."""
    path = root / named
    shipped = _SHIPPED / named
    return shipped if shipped.exists() and not path.exists() else path


def _absolute(weights: Any, root: Path, *, field: str = "checkpoint") -> Any:
    if not isinstance(weights, dict) or not isinstance(path := weights.get(field), str):
        return weights  # the engine reports the error
    return {**weights, field: str(locate(root, path))}
