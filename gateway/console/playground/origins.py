"""Outputs of earlier requests as files of a form: "edit this", "enlarge this", "to video".

A form names such an output as ``req_…/0`` in the hidden field of a file, such as ``from-image``,
and a file that was sent with a request as ``req_…/sent-0``. Only those of the visitor's own account
are found, and if it sees the contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gateway.api.http.media_views import EXPIRED, blob_of, media_of
from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.console.playground.parts import Field
from gateway.console.visitors import Visitor
from gateway.errors import Gone, NotFound
from gateway.files.kept_inputs import kept_input
from gateway.files.sources import StoredSource
from gateway.ledger.closed import ClosedRequest

PREFIX: Final = "from-"
"""What precedes the name of a file's field in that of its hidden field."""
SENT: Final = "sent-"
"""What precedes the number of a file that was sent with a request, and not made by it."""
NEXT: Final[Mapping[Task, str]] = {
    "image-edit": "Edit this",
    "image-upscale": "Enlarge this",
    "image-to-video": "To video",
    "talking-head": "To talking head",
    "video-upscale": "Enlarge this",
}
"""Tasks that go on from a picture or a video, and what that is called."""


@dataclass(frozen=True, slots=True)
class EarlierFile:
    """An output of a request, or a file that was sent with it."""

    request_id: str
    position: int
    was_sent: bool = False

    @property
    def place(self) -> str:
        return f"{self.request_id}/{SENT if self.was_sent else ''}{self.position}"

    @property
    def path(self) -> str | None:
        """The address of an output; what was sent is not shown."""
        if self.was_sent:
            return None
        return f"/console/requests/{self.request_id}/media/{self.position}"


def read_origin(text: str) -> EarlierFile:
    """Read an origin. Raise ``NotFound`` if it is none."""
    request_id, _, name = text.partition("/")
    position = name.removeprefix(SENT)
    if not request_id or not position.isdecimal() or not position.isascii() or len(position) > 4:
        raise _missing()
    return EarlierFile(request_id, int(position), was_sent=position != name)


def origins_in(fields: Sequence[Field], values: Mapping[str, str]) -> dict[str, EarlierFile]:
    """Return the origins that a form or an address names, by the names of the files' fields."""
    found = {}
    for field in fields:
        text = values.get(f"{PREFIX}{field.name}") if field.kind == "file" else None
        if text:
            found[field.name] = read_origin(text)
    return found


async def stored_source(request: ApiRequest, visitor: Visitor, origin: EarlierFile) -> StoredSource:
    """Find an origin. Raise ``NotFound``, or ``Gone`` if it was deleted."""
    account_id = visitor.account_id
    assert account_id is not None
    if not visitor.may("contents.read", account_id):
        raise _missing()
    requests = request.services.requests
    if origin.was_sent:
        kept = await kept_input(requests.media, account_id, origin.request_id)
        if kept is None or origin.position >= len(kept.attachments):
            raise _missing()
        return StoredSource(kept.attachments[origin.position])
    found = await requests.lookup.find(account_id, origin.request_id)
    media = media_of(found) if isinstance(found, ClosedRequest) else ()
    if not isinstance(found, ClosedRequest) or origin.position >= len(media):
        raise _missing()
    blob = blob_of(found, media[origin.position])
    if blob is None:
        raise Gone("blob_expired", EXPIRED)
    return StoredSource(blob)


class NextTask(NamedTuple):
    """A task that goes on from an output; ``field`` names the output in the form's address."""

    task: Task
    label: str
    field: str


def next_tasks(entries: Sequence[CatalogEntry], kind: str) -> Iterator[NextTask]:
    """Yield the tasks that go on from an output of a kind."""
    for task, label in NEXT.items():
        reads = TASKS[task].reads
        wanted = "video" if "video" in reads else "image"
        if wanted == kind and any(task in (each.task, *each.also) for each in entries):
            yield NextTask(task, label, f"{PREFIX}{wanted}")


def _missing() -> NotFound:
    return NotFound("not_found", "There is no such output to go on from.")
