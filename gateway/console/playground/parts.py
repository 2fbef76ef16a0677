"""Fields of the playground's forms, and what people call them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from gateway.catalog.tasks import Task

COMPLETION: Final = "text-completion"
FormName: TypeAlias = Task | Literal["text-completion"]
"""What a form is for: a task, or a text that is continued, which is ``text-generation`` too."""
FieldKind: TypeAlias = Literal["line", "text", "number", "choice", "file"]
ValueType: TypeAlias = Literal["text", "integer", "number", "boolean"]
ACCEPTED: Final[Mapping[str, str]] = {
    "image": "image/*",
    "images": "image/*",
    "mask": "image/*",
    "control_image": "image/*",
    "reference_image": "image/*",
    "video": "video/*",
    "audio": "audio/*",
    "recording": "audio/*",
}
RECORDED: Final = frozenset({"recording", "audio"})
"""Files that can be recorded in the browser."""
_LABELS: Final[Mapping[str, str]] = {
    "max_tokens": "At most, tokens",
    "n": "How many",
    "fps": "Frames per second",
    "min_p": "Min p",
    "top_p": "Top p",
    "top_k": "Top k",
    "seconds": "Length, s",
    "input": "Texts, one a line",
    "documents": "Documents, one a line",
    "top_n": "Results",
    "logprobs": "Log probabilities",
    "top_logprobs": "Other likely tokens, each",
    "image": "Picture",
    "control_image": "Control picture",
    "reference_image": "Reference picture",
    "images": "Pictures",
    "format": "File format",
}
_SETTINGS: Final = frozenset({"voice", "language", "key", "mood", "size"})
"""Lines that are settings."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form; ``default`` is what the model takes if it is left empty."""

    name: str
    kind: FieldKind
    label: str
    hint: str = ""
    options: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """What options are called, if not by their values."""
    default: str = ""
    least: float | None = None
    most: float | None = None
    type: ValueType = "text"
    required: bool = False
    many: bool = False
    accepts: str = ""
    aside: bool = False
    """Whether it is among the further settings, which most people leave as they are."""
    theirs: bool = False
    """Whether it is sent under ``parameters``, because the API has no field for it."""

    @property
    def is_content(self) -> bool:
        """Whether it holds what somebody wrote or made, and not a setting."""
        return self.kind in ("text", "file") or (self.kind == "line" and self.name not in _SETTINGS)


def task_of(form: FormName) -> Task:
    return "text-generation" if form == COMPLETION else form


def make_field(name: str, kind: FieldKind, **more: Any) -> Field:
    label = _LABELS.get(name, name.replace("_", " ").capitalize())
    if kind == "file":
        more = {"accepts": ACCEPTED.get(name, ""), "many": name == "images", **more}
    return Field(name, kind, label, **more)


def make_number(
    name: str, *, type: ValueType = "number", default: float | None = None, **more: Any
) -> Field:
    shown = "" if default is None else f"{default:g}"
    return make_field(name, "number", type=type, default=shown, **more)


def make_choice(
    name: str, options: Sequence[str], default: str | None = None, **more: Any
) -> Field:
    return make_field(name, "choice", options=tuple(options), default=default or "", **more)
