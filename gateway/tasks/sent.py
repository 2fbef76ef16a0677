"""The input of a submission as it was sent, for a page that shows it or fills a form again. Pure.

Files are not repeated: each is named by its place among the attachments, which are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel

from gateway.files.sources import Given, Source, StoredVoice
from gateway.tasks.registry import Input
from gateway.tasks.workflow_submission import WorkflowSubmission

GIVEN: Final = get_args(Given)
ATTACHMENT: Final = "attachment"
"""Key of an object that stands for a file: ``{"attachment": 0}`` is the first attachment."""


def sent_input(
    value: Input | WorkflowSubmission, sources: tuple[Source, ...], *, within: str
) -> dict[str, Any]:
    """Return the fields that were sent, named as in the input of ``POST /v1/requests``.

    ``within`` is the path of the input in the client's body, with which the parameters of
    ``sources`` begin.
    """
    prefix = f"{within}." if within else ""
    places = {
        source.param.removeprefix(prefix): place
        for place, source in enumerate(sources)
        if not isinstance(source.given, StoredVoice)
    }
    if isinstance(value, WorkflowSubmission):
        fields: Mapping[str, Any] = value.given
    else:
        fields = {name: getattr(value, name) for name in value.model_fields_set}
    found = {name: _plain(each, name, places) for name, each in fields.items()}
    return {name: each for name, each in found.items() if each is not None}


def _plain(value: Any, path: str, places: Mapping[str, int]) -> Any:
    if path in places:
        return {ATTACHMENT: places[path]}
    if isinstance(value, GIVEN):
        # A file that the task does not read.
        return None
    if isinstance(value, BaseModel) and any(place.startswith(f"{path}.") for place in places):
        inner = {name: getattr(value, name) for name in value.model_fields_set}
        return {name: _plain(each, f"{path}.{name}", places) for name, each in inner.items()}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, list | tuple):
        return [_plain(each, f"{path}.{place}", places) for place, each in enumerate(value)]
    return value
