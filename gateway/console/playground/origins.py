"""Outputs of earlier requests as files of a form: "edit this", "enlarge this", "to video".

A form names such an output as ``req_…/0`` in the hidden field of a file, such as ``from-image``,
a file that was sent with a request as ``req_…/sent-0``, an upload as ``file-…`` and a picture of
ours as ``ours/0``; several are separated by spaces. Only those of the visitor's own account are
found, and if it sees the contents.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlencode

from gateway.api.http.media_views import EXPIRED, blob_of, media_of
from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.console.assets import PORTRAIT, load_assets
from gateway.console.playground.parts import COMPLETION, Field, FormName
from gateway.console.visitors import Visitor
from gateway.errors import Gone, NotFound
from gateway.files.kept_inputs import kept_input
from gateway.files.sources import SentSource, StoredSource, UploadedSource
from gateway.ledger.closed import ClosedRequest

PLAYGROUND: Final = "/console/playground"
KINDS: Final = ("image", "video", "audio")
PREFIX: Final = "from-"
"""What precedes the name of a file's field in that of its hidden field."""
OURS: Final = "ours"
"""What stands in the place of a request for a picture of ours, to try a model with."""
UPLOAD: Final = "file-"
SENT: Final = "sent-"
"""What precedes the number of a file that was sent with a request, and not made by it."""
SEPARATOR: Final = " "
"""What is between the places of several files of a field."""
NEXT: Final[Sequence[tuple[str, Task, str]]] = (
    ("image", "image-edit", "Edit this"),
    ("image", "image-upscale", "Enlarge this"),
    ("image", "image-to-video", "To video"),
    ("image", "talking-head", "To talking head"),
    ("image", "text-generation", "Ask about this"),
    ("video", "video-upscale", "Enlarge this"),
    ("audio", "talking-head", "To talking head"),
    ("audio", "speech-to-text", "Write it down"),
)
"""Tasks that go on from an output of a kind, and what that is called."""


@dataclass(frozen=True, slots=True)
class EarlierFile:
    """An output of a request, a file that was sent with it, an upload, or a picture of ours, with
    the id of the request or the upload."""

    id: str
    position: int
    was_sent: bool = False

    @property
    def is_ours(self) -> bool:
        return self.id == OURS

    @property
    def is_upload(self) -> bool:
        return self.id.startswith(UPLOAD)

    @property
    def place(self) -> str:
        if self.is_upload:
            return self.id
        return f"{self.id}/{SENT if self.was_sent else ''}{self.position}"

    @property
    def path(self) -> str:
        if self.is_ours:
            return load_assets().url(PORTRAIT)
        if self.is_upload:
            return f"/console/files/{self.id}/content"
        kind = "attachments" if self.was_sent else "media"
        return f"/console/requests/{self.id}/{kind}/{self.position}"

    @property
    def title(self) -> str:
        if self.is_ours or self.is_upload:
            return "A picture of ours" if self.is_ours else "An upload of the account"
        return "The file that was sent then" if self.was_sent else "What was made before"


def read_origin(text: str) -> EarlierFile:
    """Read an origin. Raise ``NotFound`` if it is none."""
    if text.startswith(UPLOAD):
        return EarlierFile(text, 0)
    request_id, _, name = text.partition("/")
    position = name.removeprefix(SENT)
    if not request_id or not position.isdecimal() or not position.isascii() or len(position) > 4:
        raise _missing()
    return EarlierFile(request_id, int(position), was_sent=position != name)


def origins_in(
    fields: Sequence[Field], values: Mapping[str, str]
) -> dict[str, Sequence[EarlierFile]]:
    """Return the origins that a form or an address names, by the names of the files' fields."""
    found: dict[str, Sequence[EarlierFile]] = {}
    for field in fields:
        text = values.get(f"{PREFIX}{field.name}") if field.kind == "file" else None
        if text:
            places = text.split(SEPARATOR)[: None if field.many else 1]
            found[field.name] = [read_origin(each) for each in places]
    return found


async def stored_source(
    request: ApiRequest, visitor: Visitor, origin: EarlierFile
) -> StoredSource | SentSource | UploadedSource:
    """Find an origin. Raise ``NotFound``, or ``Gone`` if it was deleted."""
    account_id = visitor.account_id
    assert account_id is not None
    if origin.is_ours:
        return SentSource(_portrait, PORTRAIT)
    if origin.is_upload:
        return UploadedSource(origin.id)
    if not visitor.may("contents.read", account_id):
        raise _missing()
    requests = request.services.requests
    if origin.was_sent:
        kept = await kept_input(requests.media, account_id, origin.id)
        if kept is None or origin.position >= len(kept.attachments):
            raise _missing()
        return StoredSource(kept.attachments[origin.position])
    found = await requests.lookup.find(account_id, origin.id)
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

    def path(self, request_id: str, position: int) -> str:
        """Return the address of the form with an output."""
        asked = {"task": self.task, self.field: f"{request_id}/{position}"}
        return f"{PLAYGROUND}?{urlencode(asked)}"


def next_tasks(entries: Sequence[CatalogEntry], kind: str) -> Iterator[NextTask]:
    """Yield the tasks that go on from an output of a kind."""
    for wanted, task, label in NEXT:
        if wanted == kind and any(can_read(each, task, kind) for each in entries):
            yield NextTask(task, label, f"{PREFIX}{kind}")


def can_read(entry: CatalogEntry, task: FormName, kind: str) -> bool:
    """Whether a model does a task with files of a kind."""
    if task == COMPLETION or task not in (entry.task, *entry.also):
        return False
    if entry.workflow is not None:
        return any(each.type == kind for each in entry.workflow.inputs.values())
    return kind in (*TASKS[task].reads, *entry.input)


async def _portrait() -> AsyncIterator[bytes]:
    yield load_assets().files[PORTRAIT].content


def _missing() -> NotFound:
    return NotFound("not_found", "There is no such output to go on from.")
