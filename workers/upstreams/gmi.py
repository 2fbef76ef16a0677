"""GMI Cloud's request queue: submits a request, polls it until it ends, and fetches its media.

A request is submitted at most once. It is repeated only if the upstream refused it or was not
reached at all. If the connection was lost in between, the state is unknown, and the job fails
without a charge. An intent is stored with the job before the request is sent, and its number
afterwards, so a worker that takes over the job polls the request instead of submitting another. The
upstream has no idempotency key: if a worker is killed before it has stored the number, only the
intent remains, and the job fails. If a job ends otherwise, its request is cancelled at the
upstream.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from workers.contract.attempts import UNREAD_CHARS_MAX, UnreadResult
from workers.contract.jobs import Completed, Event, Failed, FailureCode, Job, Progress, Usage
from workers.contract.media import File
from workers.contract.models import ModelSpec
from workers.protocol.engine import PhaseClock
from workers.upstreams import gmi_refusals as refusals
from workers.upstreams import gmi_results as reading
from workers.upstreams import gmi_wire as wire
from workers.upstreams.connections import ExchangeError, NotConnectedError
from workers.upstreams.endpoints import Endpoint, Endpoints
from workers.upstreams.gmi_calls import Reply, call, send
from workers.upstreams.notes import NO_NOTES, Notes, UpstreamNote, read_note, write_note
from workers.upstreams.results import collect
from workers.upstreams.retries import (
    BUSY_PAUSE_S,
    RETRY_AFTER_MAX_S,
    EndpointBusyError,
    NoEndpointError,
    retry_after_s,
    try_endpoints,
)
from workers.upstreams.sources import prepare_sources
from workers.upstreams.sse import TooLong
from workers.upstreams.transfers import TransferError, Transfers

log = logging.getLogger(__name__)

RUN_MAX_S: Final = 3600.0
"""Time limit of a request without a deadline."""
CLOSING_S: Final = 30.0
"""Time to cancel a request, including the wait for its number."""
CLOSE_S: Final = 3.0
OUTCOME_POLLS_MAX: Final = 5
"""Polls for the outcome of a request that ended without one; some models add it a little later."""
NOT_FOUND_MAX: Final = 3
"""Consecutive 404 responses to a poll before it fails: a new request can be visible late."""


class Refused(Exception):
    """Ends the call with ``failure``."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Gmi:
    """The client of one catalog entry; its connections are shared by all jobs."""

    def __init__(self, spec: ModelSpec, environ: Mapping[str, str]) -> None:
        assert spec.upstream is not None
        self.upstream = spec.upstream
        self.options = self.read_options(spec)
        self.endpoints = Endpoints(spec.upstream, spec.name, environ, prefix=wire.PREFIX)
        self.transfers = Transfers(connect_timeout_s=spec.upstream.connect_timeout_s)
        self._background: set[asyncio.Task[None]] = set()

    @staticmethod
    def read_options(spec: ModelSpec) -> wire.Options:
        """Raise ``ValueError`` if an option is invalid."""
        return wire.read_options(spec)

    @property
    def is_down(self) -> bool:
        return self.endpoints.down

    def call(
        self,
        job: Job,
        send_event: Callable[[Event], None],
        files: Sequence[bytes] = (),
        notes: Notes = NO_NOTES,
    ) -> MediaCall:
        return MediaCall(self, job, send_event, files, notes)

    def cancel_remote(self, request: UpstreamRequest) -> None:
        """Cancel a request at the upstream, best effort."""
        if not request.is_cancelled:
            request.is_cancelled = True
            self.in_background(_cancel_remote(request))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that can outlive its job, at most until this client is closed."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=CLOSE_S)
            for task in late:
                task.cancel()
        await self.endpoints.close()
        await self.transfers.close()


@dataclass(slots=True)
class UpstreamRequest:
    """A request at an endpoint and its state."""

    endpoint: Endpoint
    submission: asyncio.Task[Reply] | None = None
    request_id: str = ""
    has_ended: bool = False
    is_noted: bool = False
    """Whether its number is stored with the job."""
    is_cancelled: bool = False


class MediaCall:
    """One job."""

    def __init__(
        self,
        client: Gmi,
        job: Job,
        send_event: Callable[[Event], None],
        files: Sequence[bytes],
        notes: Notes,
    ) -> None:
        self._client = client
        self._job = job
        self._send_event = send_event
        self._files = files
        self._notes = notes
        self._request: UpstreamRequest | None = None
        self._handover_ready = asyncio.Event()
        self._handover_ready.set()
        self._uploaded: dict[Endpoint, list[str]] = {}
        self._stage: tuple[int, int] | None = None

    async def run(self, clock: PhaseClock) -> Completed | Failed:
        failure: Failed | None = None
        is_abandoned = False
        try:
            async with asyncio.timeout(RUN_MAX_S) as timer:
                return await self._run(clock)
        except asyncio.CancelledError:
            is_abandoned = True
            raise
        except Refused as refused:
            failure = refused.failure
        except NoEndpointError:
            failure = Failed("upstream_unavailable", "No upstream endpoint is available.")
        except NotConnectedError:
            failure = Failed("upstream_unavailable", "The upstream is unreachable.")
        except EndpointBusyError as busy:
            failure = Failed("upstream_unavailable", f"The upstream is busy ({busy}).")
        except TimeoutError:
            if not timer.expired():
                raise
            failure = Failed("upstream_timeout", f"The upstream took more than {RUN_MAX_S:g} s.")
        finally:
            self._handover_ready.set()
            request = self._request
            if request is not None:
                request.endpoint.in_flight -= 1
                # Another worker takes over a request with a stored number, except after ``stop``.
                if not request.has_ended and not (is_abandoned and request.is_noted):
                    self._client.cancel_remote(request)
        return failure

    @property
    def endpoint(self) -> str:
        return "" if self._request is None else self._request.endpoint.host

    @property
    def served_by(self) -> str:
        return "" if self._request is None else self._request.endpoint.label

    async def handover_ready(self) -> None:
        await self._handover_ready.wait()

    def stop(self) -> None:
        if self._request is not None and not self._request.has_ended:
            self._client.cancel_remote(self._request)

    def partial_result(self) -> tuple[Usage, dict[str, Any]]:
        """Return nothing: a cancelled request has delivered nothing."""
        return Usage(), {}

    async def _run(self, clock: PhaseClock) -> Completed | Failed:
        noted = read_note(self._notes.found)
        if noted is not None:
            request, record = self._take_over(noted)
        else:
            submitted = await self._submit_new(clock)
            if isinstance(submitted, Failed):
                return submitted
            request, record = submitted
        with clock.phase("forward"):
            record = await self._follow(request, record)
        request.has_ended = True
        request.endpoint.succeeded()
        if record.end != "success":
            reason = _redact(request.endpoint, record.error_message)
            return refusals.failed_request(record, reason)
        with clock.phase("postprocess"):
            return await self._collect(request, record)

    async def _collect(self, request: UpstreamRequest, record: wire.Record) -> Completed | Failed:
        """Read a result, which the upstream charges. What cannot be read is kept."""
        collected = await collect(
            self._job,
            record.outcome,
            self._client.transfers,
            plain_allowed=request.endpoint.is_plain,
        )
        completed = collected.completed
        if completed is None:
            said = reading.refusal(record.outcome)
            said = _redact(request.endpoint, said or record.error_message)
            reason = f"{collected.missing}: {said}" if said else collected.missing
            failed = Failed(
                "upstream_rejected" if reading.refusal(record.outcome) else "upstream_error",
                f"The upstream's result could not be used: {reason}. Nothing is charged.",
                usage=Usage(requests=1),
            )
            return msgspec.structs.replace(failed, unread=self._unread(request, record, reason))
        if len(self._client.endpoints.all) > 1:
            completed.output["served_by"] = request.endpoint.model
        unread = self._unread(request, record, collected.missing)
        return msgspec.structs.replace(completed, unread=unread)

    def _unread(self, request: UpstreamRequest, record: wire.Record, reason: str) -> UnreadResult:
        """Return what is kept of a result for the operator. The payload is not part of it."""
        if reason:
            where = {"request_id": self._job.request_id, "upstream_id": request.request_id}
            log.error("could not read a result that the upstream charges: %s", reason, extra=where)
        value = {name: one for name, one in record.value.items() if name != "payload"}
        body = reading.kept(value)
        credential = request.endpoint.credential
        return UnreadResult(
            reason,
            number=request.request_id,
            model=request.endpoint.model,
            endpoint=request.endpoint.host,
            body=body.replace(credential, "***") if credential else body,
        )

    # --- Submitting a request ---------------------------------------------------------------------

    def _take_over(self, noted: UpstreamNote) -> tuple[UpstreamRequest, wire.Record]:
        """Take over the request of another worker. Raise ``Refused`` if that is not possible."""
        if not noted.number:
            where = {"request_id": self._job.request_id, "model": self._job.model}
            log.error("a request may have been submitted under an unknown number", extra=where)
            raise Refused(Failed("upstream_error", _UNKNOWN_STATE))
        for endpoint in self._client.endpoints.all:
            if (endpoint.url, endpoint.model) == (noted.endpoint, noted.model):
                log.info("request taken over", extra={"request_id": self._job.request_id})
                endpoint.in_flight += 1
                self._request = request = UpstreamRequest(
                    endpoint, request_id=noted.number, is_noted=True
                )
                return request, wire.Record(noted.number)
        raise Refused(
            Failed(
                "upstream_unavailable",
                "The request was submitted to an endpoint that is no longer in the catalog. It was "
                "not submitted again, and nothing is charged.",
            )
        )

    async def _submit_new(self, clock: PhaseClock) -> tuple[UpstreamRequest, wire.Record] | Failed:
        with clock.phase("preprocess"):
            types = [ref.content_type for ref in self._job.attachments]
            prepared = await asyncio.to_thread(prepare_sources, self._files, types)
        if isinstance(prepared, Failed):
            return prepared
        with clock.phase("transfer"):
            return await self._submit(prepared)

    async def _submit(self, files: Sequence[File]) -> tuple[UpstreamRequest, wire.Record]:
        """Submit to one endpoint; to another one only if the first did not accept it."""

        async def attempt(endpoint: Endpoint) -> tuple[UpstreamRequest, wire.Record]:
            try:
                return await self._submit_to(endpoint, files)
            except _NOT_ACCEPTED:
                self._handover_ready.set()
                await self._notes.keep("")  # another worker may submit it
                raise

        return await try_endpoints(
            self._client.endpoints, attempt, retried=_NOT_ACCEPTED, key=self._job.drawn_by
        )

    async def _submit_to(
        self, endpoint: Endpoint, files: Sequence[File]
    ) -> tuple[UpstreamRequest, wire.Record]:
        if self._request is not None:
            self._request.endpoint.in_flight -= 1
        self._request = request = UpstreamRequest(endpoint, has_ended=True)
        endpoint.in_flight += 1
        if endpoint not in self._uploaded:
            self._uploaded[endpoint] = [await self._upload(endpoint, file) for file in files]
        sources = wire.sort_sources(self._job, self._uploaded[endpoint])
        body = wire.payload(self._job, self._client.options, sources)
        note = UpstreamNote(endpoint.url, endpoint.model)
        if not await self._notes.keep(write_note(note)):
            raise Refused(Failed("upstream_unavailable", "The job was passed to another worker."))
        request.has_ended = False
        self._handover_ready.clear()
        request.submission = asyncio.create_task(
            send(endpoint, "POST", "requests", {"model": endpoint.model, "payload": body})
        )
        try:
            async with asyncio.timeout(self._client.options.submit_timeout_s):
                # Shielded: after a cancellation it is still awaited for its number.
                reply = await asyncio.shield(request.submission)
        except NotConnectedError:
            request.has_ended = True
            endpoint.failed()
            raise
        except (ExchangeError, TooLong, TimeoutError) as error:
            endpoint.failed()
            timed_out = isinstance(error, TimeoutError)
            code: FailureCode = "upstream_timeout" if timed_out else "upstream_error"
            raise Refused(Failed(code, _UNKNOWN_STATE)) from error
        if reply.status not in (200, 201, 202):
            request.has_ended = True
            self._refuse(endpoint, reply, what=_REQUEST)
        record = self._read_submitted(request, reply)
        if record.request_id and record.end is None:
            self._client.in_background(self._store_number(request, note))
        return request, record

    async def _store_number(self, request: UpstreamRequest, note: UpstreamNote) -> None:
        """Store the number of a request with its job, retrying until the queue answers."""
        kept = msgspec.structs.replace(note, number=request.request_id)
        request.is_noted = await self._notes.keep(write_note(kept))
        self._handover_ready.set()

    def _read_submitted(self, request: UpstreamRequest, reply: Reply) -> wire.Record:
        try:
            record = wire.decode_record(reply.body)
        except msgspec.DecodeError:
            text = reply.body[:UNREAD_CHARS_MAX].decode(errors="replace")
            record = wire.Record(value={"response": text})
        request.request_id = record.request_id
        if not record.request_id and record.end is None:
            request.endpoint.failed()
            unread = self._unread(request, record, "the response to the submission has no number")
            raise Refused(Failed("upstream_error", _UNKNOWN_STATE, unread=unread))
        return record

    async def _upload(self, endpoint: Endpoint, file: File) -> str:
        """Upload a source file. Return the URL from which the upstream's models read it."""
        try:
            reply = await call(
                endpoint, "POST", "upload-url", {"file_type": file.content_type.partition("/")[2]}
            )
        except NotConnectedError:
            endpoint.failed()
            raise
        except (ExchangeError, TooLong, TimeoutError) as error:
            endpoint.failed()
            raise Refused(refusals.no_upload("the connection was lost")) from error
        if reply.status not in (200, 201):
            self._refuse(endpoint, reply, what="a source file")
        try:
            upload = wire.decode_upload(reply.body)
            await self._client.transfers.upload(
                upload.upload_url, file, plain_allowed=endpoint.is_plain
            )
        except msgspec.DecodeError:
            raise Refused(refusals.no_upload("the response contains no URL")) from None
        except TransferError as error:
            raise Refused(refusals.no_upload(str(error))) from error
        return upload.public_url

    def _refuse(self, endpoint: Endpoint, reply: Reply, *, what: str) -> None:
        """Raise ``EndpointBusyError`` if the call can be retried, otherwise ``Refused``."""
        error_message = _redact(endpoint, wire.read_error_message(reply.body))
        status = refusals.effective_status(reply.status, error_message)
        if status in refusals.BUSY:
            requested_s = retry_after_s(reply.headers)
            if status == HTTPStatus.TOO_MANY_REQUESTS:
                endpoint.pause(min(requested_s or BUSY_PAUSE_S, RETRY_AFTER_MAX_S))
            else:
                endpoint.failed()
            raise EndpointBusyError(status, requested_s)
        is_request = what == _REQUEST
        if status in refusals.CALLERS or (status == HTTPStatus.NOT_FOUND and is_request):
            endpoint.succeeded()
        else:
            endpoint.failed()
        if status not in refusals.CALLERS:
            log.error(
                "upstream refused a call",
                extra={"model": self._job.model, "status": status, "reason": error_message},
            )
        failed = refusals.refused_call(status, error_message, what=what, is_request=is_request)
        raise Refused(failed)

    # --- Polling ----------------------------------------------------------------------------------

    async def _follow(self, request: UpstreamRequest, record: wire.Record) -> wire.Record:
        """Poll a request until it has ended, at growing randomised intervals."""
        options = self._client.options
        now_s = asyncio.get_running_loop().time
        pause_s, requested_s, answered_s, lost = options.poll_min_s, 0.0, now_s(), 0
        submitted_s, without_outcome = now_s(), 0
        while record.end is None or (record.end == "success" and not record.outcome):
            if record.end is not None:
                without_outcome += 1
                if without_outcome > OUTCOME_POLLS_MAX or not request.request_id:
                    break
            elif record.is_waiting and now_s() - submitted_s > options.queued_timeout_s:
                raise Refused(refusals.not_started(options.queued_timeout_s))
            self._report_progress(record)
            pause_s = min(options.poll_max_s, random.uniform(options.poll_min_s, 3 * pause_s))
            await asyncio.sleep(max(pause_s, requested_s))
            requested_s, problem = 0.0, "no response"
            try:
                reply = await call(request.endpoint, "GET", f"requests/{request.request_id}")
            except (ExchangeError, TooLong, TimeoutError):
                request.endpoint.failed()
            else:
                if reply.status == HTTPStatus.OK:
                    try:
                        record = wire.decode_record(reply.body)
                        answered_s, lost = now_s(), 0
                        continue
                    except msgspec.DecodeError:
                        problem = "invalid response"
                elif reply.status in (401, 402, 403):
                    self._refuse(request.endpoint, reply, what=_REQUEST)
                else:
                    problem = f"status {reply.status}"
                    requested_s = min(retry_after_s(reply.headers) or 0.0, RETRY_AFTER_MAX_S)
                    lost = lost + 1 if reply.status == HTTPStatus.NOT_FOUND else 0
            if lost >= NOT_FOUND_MAX or now_s() - answered_s > self._client.upstream.idle_timeout_s:
                message = f"The upstream accepted the request, but cannot be polled: {problem}."
                unread = self._unread(request, record, f"it cannot be polled: {problem}")
                raise Refused(Failed("upstream_error", message, unread=unread))
        return record

    def _report_progress(self, record: wire.Record) -> None:
        if record.stage is not None and record.stage != self._stage:
            self._stage = record.stage
            self._send_event(Progress(*record.stage))


_UNKNOWN_STATE: Final = (
    "The connection to the upstream was lost while the request was submitted, or the worker ended, "
    "so it is unknown whether it was accepted. It was not sent again, and nothing is charged."
)
_REQUEST: Final = "the request"
_NOT_ACCEPTED: Final = (EndpointBusyError, NotConnectedError)


def _redact(endpoint: Endpoint, message: str) -> str:
    """Return an upstream's message with our credential removed."""
    if endpoint.credential:
        message = message.replace(endpoint.credential, "***")
    return message[: wire.MESSAGE_CHARS_MAX]


async def _cancel_remote(request: UpstreamRequest) -> None:
    """Cancel a request once its number is known, if it was accepted at all."""
    submission = request.submission
    try:
        async with asyncio.timeout(CLOSING_S):
            if not request.request_id and submission is not None:
                request.request_id = wire.decode_record((await submission).body).request_id
            if request.request_id:
                await call(request.endpoint, "DELETE", f"requests/{request.request_id}")
    except (ExchangeError, TooLong, TimeoutError, msgspec.DecodeError) as error:
        log.info("could not cancel an upstream request", extra={"error": type(error).__name__})
    finally:
        if submission is not None:
            submission.cancel()
