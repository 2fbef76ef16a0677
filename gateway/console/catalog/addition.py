"""Adding an own checkpoint to the catalog: proposed and proved by a process, then edited and saved.

The process is ``tollgate model add --dry-run``: the gateway itself loads no engine. What it
proposes becomes a text of the catalog file, which is checked, compared and saved as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import msgspec
from litestar import Controller, Response, get, post

from gateway.api.http.request import ApiRequest
from gateway.catalog.editing.insertion import entry_text, insert_entry
from gateway.catalog.reloads import digest_of as digest_of_file
from gateway.catalog.tasks import Task
from gateway.console.answers import see_other
from gateway.console.guards import needs, proved
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress
from gateway.console.jobs.store import ConsoleJob, NewJob, digest_of, find_latest
from gateway.console.queries import FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, TollgateError

KIND: Final = "model.add"
TIMEOUT_S: Final = 3600.0
"""Time within which a checkpoint is loaded and proved."""
TEXT_MAX: Final = 1000
TASKS: Final[tuple[str, ...]] = get_args(Task)
REFUSED: Final = "tollgate: "
"""Start of the line in which the command says why it refused."""


class AdditionPages(Controller):
    path = "/catalog/add"

    @get(guards=[needs("catalog.write")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _page(request, visitor)

    @post(guards=[needs("catalog.write"), proved])
    async def propose(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """Start the process that proposes an entry and proves it."""
        form, path = await read_form(request), request.services.live.path
        try:
            arguments = _arguments(form)
        except TollgateError as error:
            return await _page(request, visitor, form, error)

        async def work(_: Progress) -> Any:
            return await _propose(["--catalog", str(path), *arguments])

        digest = digest_of(arguments)
        job = NewJob(
            kind=KIND,
            digest=digest,
            starter=visitor.author().name,
            act="catalog.write",
            back=f"/console/catalog/add?job={digest}",
        )
        await start_job(request, job, work)
        return see_other(job.back)


def _arguments(form: FormValues) -> list[str]:
    """Return the arguments of the command. Raise ``InvalidRequest``."""
    directory, name, task = form.text("directory"), form.text("name"), form.text("task")
    if directory is None or len(directory) > TEXT_MAX or "\0" in directory:
        raise InvalidRequest("invalid_value", "Name a directory.", param="directory")
    if task is not None and task not in TASKS:
        raise InvalidRequest("invalid_value", f"Unknown task {task!r}.", param="task")
    found = [f"--name={name[:TEXT_MAX]}"] if name else []
    found += [f"--task={task}"] if task else []
    lines = [line.strip() for line in form.raw("prices").splitlines()]
    return [*found, *(f"--price={line[:TEXT_MAX]}" for line in lines if line), "--", directory]


async def _propose(arguments: Sequence[str]) -> Any:
    """Run the command and return what it proposes. Raise ``InvalidRequest`` if it refuses."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "model", "add", "--dry-run", "--json", *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, said = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        refused = [line.removeprefix(REFUSED) for line in lines if line.startswith(REFUSED)]
        message = (refused or lines)[-1][:TEXT_MAX]
        raise InvalidRequest("invalid_value", f"{message[:1].upper()}{message[1:]}")
    return msgspec.json.decode(out)


async def _page(
    request: ApiRequest,
    visitor: Visitor,
    form: FormValues | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    digest, services = Query(request).text("job"), request.services
    job: ConsoleJob | None = None
    if digest is not None:
        known = digest
        job = await services.database.read(lambda connection: find_latest(connection, KIND, known))
    found: Mapping[str, Any] | None = None
    text, problem = None, None
    content = b""
    if job is not None and job.state == "done":
        found = job.result
        try:
            content = await asyncio.to_thread(services.live.path.read_bytes)
            text = insert_entry(content.decode(), job.result["entry"])
        except (OSError, ValueError) as refused:
            problem = str(refused)
    return await page(
        request,
        visitor,
        "catalog/add.html",
        title=f"{found['entry']['name']} can be served" if found else "Add an own checkpoint",
        status=error.http_status if error else 200,
        job=job,
        found=found,
        entry=entry_text(found["entry"], 0) if found else None,
        text=text,
        expected=digest_of_file(content),
        problem=problem,
        tasks=TASKS,
        file=str(services.live.path),
        values=form.values() if form else {},
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


HANDLERS: Final[list[Any]] = [AdditionPages]
