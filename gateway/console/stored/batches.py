"""Batches: how far each is, what it costs, what failed; a new one, after a check of its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.datastructures import UploadFile
from litestar.params import FromPath
from litestar.response import Redirect

from gateway.accounts.accounts import Account
from gateway.accounts.keys import KeyInfo, limited_key
from gateway.api.http.request import ApiRequest
from gateway.batches import store
from gateway.batches.line_errors import LineErrors, error_file, errors_in_file, errors_in_sql
from gateway.batches.store import Batch, NewBatch
from gateway.batches.trial import WINDOW, Trial, try_file
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.stored.files import chosen_account, upload_file
from gateway.console.views.files import TableFile
from gateway.console.views.formats import usd
from gateway.console.views.requests import StateKind
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound, TollgateError
from gateway.files.store import File, find_file
from gateway.operations.keys import console_key
from gateway.pricing import parse_usd
from workers.contract.blobs import BlobError

KINDS: Final[Mapping[str, StateKind]] = {
    "validating": "open",
    "in_progress": "open",
    "finalizing": "open",
    "cancelling": "open",
    "completed": "good",
    "cancelled": "idle",
    "failed": "bad",
    "expired": "bad",
}
FILES: Final = 100
"""Files that are offered for a new batch."""
EXAMPLE: Final = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": '
    '{"model": "…", "messages": [{"role": "user", "content": "What is a queue?"}]}}'
)


FILE_COLUMNS: Final = (
    *("id", "status", "endpoint", "model", "total", "completed", "failed", "input_tokens"),
    *("output_tokens", "cost_nanos", "most_nanos", "metadata", "created_at", "expires_at"),
)
LISTS: Final = (
    ListColumns(
        "batches",
        {
            "state": "State",
            "model": "Model",
            "bar": "Done as a bar",
            "done": "Done",
            "failed": "Failed",
            "total": "Of",
            "cost": "Cost, $",
            "most": "At most, $",
            "ends": "Ends at latest",
        },
    ),
)


class BatchPages(Controller):
    path = "/batches"

    @get(guards=[needs("batches.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query, account = Query(request), await chosen_account(request, visitor)
        found, more = await request.services.database.report(
            lambda connection: store.page(
                connection, account.id, limit=query.rows, after=query.text("cursor")
            ),
            account_id=account.id,
        )
        running = sum(each.ended_at is None for each in found)
        return await page(
            request,
            visitor,
            "stored/batches.html",
            lists=LISTS,
            title=f"{running} batch{'' if running == 1 else 'es'} of {account.name} running"
            if running
            else f"Batches of {account.name}",
            account=account,
            as_file=TableFile("batches", FILE_COLUMNS, found, is_cut=bool(more)),
            rows=found,
            kinds=KINDS,
            example=EXAMPLE,
            pager=query.pages(found[-1].id if more else None),
        )

    @get("/new", guards=[needs("batches.write")])
    async def new(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _new_page(request, visitor, chosen=Query(request).text("file"))

    @post(guards=[needs("batches.write")])
    async def create(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        services, account = request.services, await chosen_account(request, visitor)
        form = await read_form(request)
        file_id, endpoint = form.text("file_id") or "", form.text("endpoint") or ""
        try:
            if endpoint not in services.batches.endpoints:
                raise InvalidRequest("invalid_value", "Check the file first.", param="file_id")
            key = await _key(request, visitor, account)
            now = datetime.now(UTC)
            new = NewBatch(account.id, key.id, endpoint, file_id, WINDOW, None, None)
            made = await services.database.write(
                lambda connection: store.create(
                    connection,
                    new,
                    now=now,
                    window=timedelta(seconds=services.settings.batch_window_s),
                    open_max=services.settings.account_batches_max,
                    # A form that is sent twice makes one batch.
                    same_since=now - timedelta(seconds=services.settings.retry_window_s),
                )
            )
        except TollgateError as error:
            return await _new_page(request, visitor, chosen=file_id, error=error)
        services.batches.wake()
        return see_other(f"/console/batches/{made.id}")

    @get("/{batch_id:str}", guards=[needs("batches.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, batch_id: FromPath[str]
    ) -> Response[str]:
        account = await chosen_account(request, visitor)
        batch, errors, input_file = await _read(request, account, batch_id)
        return await page(
            request,
            visitor,
            "stored/batch.html",
            title=_title(batch),
            account=account,
            batch=batch,
            kind=KINDS[batch.status],
            errors=errors,
            input_file=input_file,
            may_cancel=batch.status in store.CANCELLABLE and visitor.may("batches.write"),
        )

    @post("/{batch_id:str}/cancel", guards=[needs("batches.write")])
    async def cancel(
        self, request: ApiRequest, visitor: CurrentVisitor, batch_id: FromPath[str]
    ) -> Redirect:
        account, now = await chosen_account(request, visitor), datetime.now(UTC)
        await request.services.database.write(
            lambda connection: store.cancel(connection, account.id, batch_id, now=now)
        )
        request.services.batches.wake()
        return see_other(f"/console/batches/{batch_id}")


class BatchChecks(Controller):
    """The route whose body can have the size of a file."""

    path = "/batches/check"

    @post(status_code=200, guards=[needs("batches.write")])
    async def check(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        """Store the file that was sent, or take one that is there; check it, and quote it."""
        form, account = await request.form(), await chosen_account(request, visitor)
        sent, file_id = form.get("file"), str(form.get("file_id") or "")
        try:
            if isinstance(sent, UploadFile) and sent.filename:
                file = await upload_file(request, visitor, "batch")
            else:
                file = await request.services.files.find(account.id, file_id, param="file_id")
            trial = await _try(request, visitor, account, file)
        except TollgateError as error:
            return await _new_page(request, visitor, chosen=file_id, error=error)
        return await _new_page(request, visitor, chosen=file.id, trial=trial)


async def _try(request: ApiRequest, visitor: Visitor, account: Account, file: File) -> Trial:
    services = request.services
    if file.purpose != "batch":
        raise InvalidRequest("invalid_value", f"{file.id} is not for batches.", param="file_id")
    key = await _key(request, visitor, account)
    try:
        return await try_file(
            file,
            key_id=key.id,
            now=datetime.now(UTC),
            files=services.files,
            endpoints=services.batches.endpoints,
            requests=services.requests,
            settings=services.settings,
        )
    except BlobError:
        raise NotFound("file_not_found", f"{file.id} cannot be read.", param="file_id") from None


async def _key(request: ApiRequest, visitor: Visitor, account: Account) -> KeyInfo:
    """Return the key that pays: the visitor's, if it entered with one, otherwise the console's."""
    services, key_id = request.services, visitor.key_id
    if key_id is not None:
        return await services.database.read(lambda each: limited_key(each, key_id))
    return await services.database.write(
        lambda each: console_key(
            each,
            visitor.author(),
            account.id,
            spend_limit_nanos=parse_usd(services.settings.console_spend_limit_usd),
            pepper=services.pepper,
        )
    )


async def _read(
    request: ApiRequest, account: Account, batch_id: str
) -> tuple[Batch, Sequence[LineErrors], File | None]:
    """Return a batch, why its lines failed, and its input if that is still there."""

    def read(connection: Any) -> tuple[Batch, list[LineErrors], File | None, File | None]:
        batch = store.find(connection, account.id, batch_id)
        running = errors_in_sql(connection, batch) if batch.ended_at is None else []
        try:
            source: File | None = find_file(connection, account.id, batch.input_file_id)
        except NotFound:
            source = None
        return batch, running, error_file(connection, batch), source

    services = request.services
    batch, errors, file, source = await services.database.read(read)
    if file is not None:
        try:
            errors = await errors_in_file(services.files, file)
        except BlobError:
            errors = []
    return batch, errors, source


async def _new_page(
    request: ApiRequest,
    visitor: Visitor,
    *,
    chosen: str | None = None,
    trial: Trial | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    account = await chosen_account(request, visitor)
    found = await request.services.files.list(account.id, limit=FILES, purpose="batch")
    return await page(
        request,
        visitor,
        "stored/batch_new.html",
        title=_trial_title(trial) if trial else "A new batch",
        status=error.http_status if error else 200,
        account=account,
        files=[(each.id, f"{each.filename}, {each.id[:14]}…") for each in found.items],
        chosen=chosen or "",
        trial=trial,
        example=EXAMPLE,
        bytes_max=request.services.settings.file_bytes_max,
        lines_max=request.services.settings.batch_lines_max,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


def _trial_title(trial: Trial) -> str:
    mistakes, total = len(trial.report.mistakes), trial.report.total
    if mistakes:
        return f"{mistakes} mistake{'' if mistakes == 1 else 's'} in the file"
    most = usd(trial.report.most_nanos)
    return f"{total} request{'' if total == 1 else 's'} for at most {most}"


def _title(batch: Batch) -> str:
    done = batch.completed + batch.failed
    if batch.ended_at is None and batch.total:
        return f"{done} of {batch.total} requests done, {usd(batch.cost_nanos)} so far"
    if batch.ended_at is None:
        return "The file is being checked"
    if not batch.total:
        return f"Nothing was run: {batch.status}"
    failed = f", {batch.failed} failed" if batch.failed else ""
    return f"{batch.completed} of {batch.total} requests succeeded{failed}: {usd(batch.cost_nanos)}"


HANDLERS: Final[list[Any]] = [BatchPages]
UPLOADS: Final[list[Any]] = [BatchChecks]
