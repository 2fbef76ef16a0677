"""Pictures that guide an image beside its prompt: for a control network, and as a reference. Pure.

An entry lists its control networks, and whether it reads a reference, in the engine's options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.catalog.schema import CatalogEntry, StrengthRange
from gateway.errors import InvalidRequest
from gateway.files.sources import Source
from gateway.tasks.prepared import over

REFERENCE: Final = "image"
"""The only kind of reference: the value of the condition ``reference`` of a price."""


@dataclass(frozen=True, slots=True)
class Guides:
    """The guiding pictures of a request, as it sent them."""

    control: str | None = None
    control_image: Any = None
    control_strength: float | None = None
    reference_image: Any = None
    reference_strength: float | None = None

    def sources(self, prefix: str) -> Iterator[Source]:
        """Yield the attachments in the order of the worker contract."""
        for field in ("control_image", "reference_image"):
            if (given := getattr(self, field)) is not None:
                yield Source("image", given, f"{prefix}{field}")


def choose_guides(
    entry: CatalogEntry, guides: Guides, prefix: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the input, and the attributes that prices use.

    Raise ``InvalidRequest`` if the entry lacks what is requested.
    """
    fields: dict[str, Any] = {}
    attributes = entry.unguided
    if (control := _control(entry, guides, prefix)) is not None:
        known, strength = entry.known_controls[control], guides.control_strength
        fields["control"] = attributes["control"] = control
        fields["control_strength"] = _strength(entry, f"{prefix}control_strength", strength, known)
    if guides.reference_image is not None:
        listed = entry.known_references.get(REFERENCE)
        if listed is None:
            raise _unknown(f"{prefix}reference_image", f"{entry.name} reads no reference images.")
        strength = guides.reference_strength
        fields["reference"], attributes["reference"] = True, REFERENCE
        fields["reference_strength"] = _strength(
            entry, f"{prefix}reference_strength", strength, listed
        )
    elif guides.reference_strength is not None:
        raise _unsent(f"{prefix}reference_image", f"{prefix}reference_strength")
    return fields, attributes


def _control(entry: CatalogEntry, guides: Guides, prefix: str) -> str | None:
    """Return the control network of a request: the named one, or the entry's only one."""
    known: Mapping[str, StrengthRange] = entry.known_controls
    if guides.control_image is None:
        for field in ("control", "control_strength"):
            if getattr(guides, field) is not None:
                raise _unsent(f"{prefix}control_image", f"{prefix}{field}")
        return None
    if not known:
        raise _unknown(f"{prefix}control_image", f"{entry.name} has no control networks.")
    listed = ", ".join(known)
    if guides.control is None and len(known) > 1:
        raise InvalidRequest(
            "missing_required_parameter",
            f"{entry.name} has several control networks; send {prefix}control, one of: {listed}.",
            param=f"{prefix}control",
        )
    name = next(iter(known)) if guides.control is None else guides.control
    if name not in known:
        raise InvalidRequest(
            "invalid_value",
            f"{entry.name} has no control network {name}; it has: {listed}.",
            param=f"{prefix}control",
        )
    return name


def _strength(entry: CatalogEntry, param: str, given: float | None, listed: StrengthRange) -> float:
    if given is not None and given > listed.strength_max:
        raise over(param, given, f"{entry.name} takes at most {listed.strength_max:g}")
    return listed.strength if given is None else given


def _unknown(param: str, message: str) -> InvalidRequest:
    return InvalidRequest("unsupported_parameter", message, param=param)


def _unsent(missing: str, param: str) -> InvalidRequest:
    message = f"{param} needs a picture; send {missing}."
    return InvalidRequest("missing_required_parameter", message, param=missing)
