"""What a worker must know of a catalog entry: which engine runs it, from where, with what options.

Read from the same ``catalog.yaml`` that the gateway validates and prices; whatever else stands
there (prices above all) is skipped unread. The gateway's checks are stricter and come first
(``gateway/catalog``), so an error here means that a worker was given another file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml


class EndpointSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of several places where a model is served."""

    url: str
    model: str | None = None
    credential: str | None = None
    tier: int = 0
    """Those of a higher number are asked only when none of the lower takes work: a fallback, which
    may be another model."""
    concurrency: int | None = None


class UpstreamSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that somebody else serves over HTTP, at one ``url`` or at several ``endpoints``."""

    url: str = ""
    """Base address, such as ``https://api.example.com/v1``."""
    endpoints: tuple[EndpointSpec, ...] = ()
    dialect: str = "openai"
    model: str | None = None
    """Its name over there, where that differs from ours."""
    credential: str | None = None
    """Name of the environment variable with the key; never the key itself."""
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 60.0
    idle_timeout_s: float = 60.0
    concurrency: int = 64
    """Requests in flight from one worker."""

    @property
    def places(self) -> tuple[EndpointSpec, ...]:
        """Every endpoint, with what it does not say itself."""
        return tuple(
            EndpointSpec(
                one.url,
                one.model or self.model,
                one.credential or self.credential,
                one.tier,
                one.concurrency or self.concurrency,
            )
            for one in self.endpoints or (EndpointSpec(self.url),)
        )


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a catalog entry that concerns a worker; exactly one of engine and upstream."""

    name: str
    task: str
    engine: str | None = None
    checkpoint: str | None = None
    """Directory of the weights; a relative one starts at the catalog's own directory."""
    options: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    upstream: UpstreamSpec | None = None
    also: tuple[str, ...] = ()
    """Further tasks of the same model."""
    workflow: Any = None
    """A chain of other entries: nothing that a worker runs."""

    @property
    def route(self) -> str:
        """The engine that runs it: its name in the registry, or ``upstream``."""
        return self.engine or "upstream"


class _File(msgspec.Struct, frozen=True):
    models: tuple[ModelSpec, ...]


def read_specs(catalog: Path) -> tuple[ModelSpec, ...]:
    """Read every entry of a catalog file but workflows, all paths made absolute: the checkpoint's
    own, those of adapters, and those of the models which guess ahead for it or enlarge what it
    draws, named by their entry or by their directory.

    Raise ``OSError`` if it cannot be read and ``ValueError`` if it is no catalog.
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
            path = root / checkpoints.get(named, named)
            options["speculation"] = {**guesser, "checkpoint": str(path)}
        if isinstance(named := options.get("upscaler"), str):
            options["upscaler"] = str(root / checkpoints.get(named, named))
        if isinstance(loras := options.get("lora"), list):
            options["lora"] = [_absolute(lora, root) for lora in loras]
        own = None if spec.checkpoint is None else str(root / spec.checkpoint)
        found.append(msgspec.structs.replace(spec, checkpoint=own, options=options))
    return tuple(found)


def _absolute(lora: Any, root: Path) -> Any:
    if not isinstance(lora, dict) or not isinstance(path := lora.get("checkpoint"), str):
        return lora  # the engine says what is wrong with it
    return {**lora, "checkpoint": str(root / path)}
