"""A reference of the queue in plain Python: lists and sums, without a server and a clock.

Written from the description of the queue, not from its script, as simply as possible. Time is
reduced to flags: a lease or a delay has expired or not, and a deadline is either past or far away.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

CRASHES_MAX = 3
RETRIES_MAX = 8


@dataclass
class Job:
    id: str
    account: str
    payload: bytes
    cost_us: int
    weight: float
    past_deadline: bool
    has_deadline: bool
    batch_key: str
    reply: str
    arrival: int
    state: str = "queued"
    attempt: int = 0
    crashes: int = 0
    retries: int = 0
    token: str = ""
    worker: str = ""
    cancel: str = ""
    moved: bool = False
    expired: bool = False
    """Whether its lease or its delay has expired."""


@dataclass
class Reference:
    jobs: dict[str, Job] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)
    """Jobs that were cancelled before they were enqueued."""
    done: list[tuple[str, str, int, bytes, str]] = field(default_factory=list)
    """id, status, attempt, outcome, reason."""
    arrivals: int = 0
    virtual: float = 0.0
    eligible: dict[str, float] = field(default_factory=dict)
    finish: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    answers: dict[str, tuple[str, list[str]]] = field(default_factory=dict)

    # --- Observations -----------------------------------------------------------------------------

    def waiting(self, account: str | None = None) -> list[Job]:
        return sorted(
            (
                job
                for job in self.jobs.values()
                if job.state == "queued" and account in (None, job.account)
            ),
            key=lambda job: (job.account, job.arrival),
        )

    def running(self, account: str | None = None) -> list[Job]:
        return [
            job
            for job in self.jobs.values()
            if job.state == "running" and account in (None, job.account)
        ]

    def delayed(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "delayed"]

    def live(self) -> list[Job]:
        return [*self.waiting(), *self.running(), *self.delayed()]

    def leased(self, worker: str) -> list[Job]:
        return [job for job in self.running() if job.worker == worker]

    # --- Operations -------------------------------------------------------------------------------

    def enqueue(self, job: Job, *, queue_max: int, account_max: int) -> str:
        if job.id in self.jobs or job.id in self.barred:
            return "duplicate"
        if len(self.waiting()) >= queue_max:
            return "queue_full"
        if len(self.waiting(job.account)) >= account_max:
            return "account_full"
        self.arrivals += 1
        job.arrival = self.arrivals
        self.jobs[job.id] = job
        self._queue(job)
        return "ok"

    def lease(
        self, worker: str, count: int, *, share: float, look: int, nonce: str, lapses: bool
    ) -> list[Job]:
        nonce_before, ids = self.answers.get(worker, ("", []))
        if nonce_before == nonce:
            again = [self.jobs[id] for id in ids]
            again = [job for job in again if job.state == "running" and nonce in job.token]
            for job in again:
                job.expired = lapses
            return again
        taken: list[Job] = []
        most = max(int(share * (len(self.running()) + count)), 1)
        self._serve(taken, worker, count, most=most, look=look, nonce=nonce, lapses=lapses)
        # Slots that no other account needs are assigned by tag, ignoring the share.
        self._serve(taken, worker, count, most=math.inf, look=look, nonce=nonce, lapses=lapses)
        if taken:
            self.answers[worker] = (nonce, [job.id for job in taken])
        return taken

    def _serve(
        self,
        taken: list[Job],
        worker: str,
        count: int,
        *,
        most: float,
        look: int,
        nonce: str,
        lapses: bool,
    ) -> None:
        passed_over: set[str] = set()
        weight = 0.0
        while len(taken) < count:
            turns = [(tag, name) for name, tag in self.eligible.items() if name not in passed_over]
            if not turns:
                break
            tag, account = min(turns)
            seen = self.waiting(account)[: look if taken else 1]
            fitting = [job for job in seen if not taken or job.batch_key == taken[0].batch_key]
            if not fitting:
                passed_over.add(account)
            elif fitting[0].past_deadline:
                self._end(fitting[0], "expired", reason="deadline")
            elif len(self.running(account)) >= most:
                passed_over.add(account)
                weight = max(weight, fitting[0].weight)
            elif fitting[0].weight < weight:
                passed_over.add(account)
            else:
                self._start(fitting[0], worker, f"{nonce}:{len(taken) + 1}", tag, lapses=lapses)
                taken.append(fitting[0])

    def heartbeat(
        self, leased: Iterable[tuple[str, str]], *, lapses: bool
    ) -> tuple[set[str], dict[str, str], dict[str, str]]:
        lost: set[str] = set()
        cancelled: dict[str, str] = {}
        replies: dict[str, str] = {}
        for id, token in leased:
            job = self.jobs.get(id)
            if job is None:
                continue
            if job.state != "running" or job.token != token:
                lost.add(id)
                continue
            job.expired = lapses
            if job.cancel:
                cancelled[id] = job.cancel
            if job.moved:
                replies[id] = job.reply
        return lost, cancelled, replies

    def complete(self, id: str, token: str, status: str, outcome: bytes, *, delay: str) -> str:
        """``delay`` is ``none``, ``short`` (expires immediately) or ``long`` (beyond any
        deadline)."""
        job = self.jobs.get(id)
        if job is None:
            if status in ("ok", "cancelled"):
                ghost = Job(id, "", b"", 0, 1, False, False, "", "", 0, token=token)
                self.jobs[id] = ghost
                ghost.state = status
                self.done.append((id, status, 0, outcome, ""))
            return "unknown"
        if job.token != token:
            return "fenced"
        if job.state != "running":
            return "already"
        self._release(job)
        if status != "retry":
            self._end(job, status, outcome, job.cancel)
            return "done"
        if job.cancel:
            self._stop(job, job.cancel)
            return "done"
        too_late = job.past_deadline or (job.has_deadline and delay == "long")
        if job.retries >= RETRIES_MAX or too_late:
            self._end(job, "failed", outcome, "retries")
            return "done"
        job.retries += 1
        if delay == "none":
            self._queue(job)
        else:
            job.state = "delayed"
            job.expired = delay == "short"
        return "retrying"

    def release_worker(self, worker: str, *, crashed: bool) -> int:
        leased = self.leased(worker)
        for job in leased:
            self._reclaim(job, crashed=crashed, reason="worker lost")
        self.answers.pop(worker, None)
        return len(leased)

    def cancel(self, id: str, reason: str) -> str:
        job = self.jobs.get(id)
        if job is None:
            self.barred.add(id)
            return "unknown"
        if job.state == "running":
            job.cancel = job.cancel or reason
            return "cancelling"
        if job.state in ("queued", "delayed"):
            self._stop(job, reason)
            return "cancelled"
        return "ended"

    def set_reply(self, id: str, reply: str) -> bool:
        job = self.jobs.get(id)
        if job is None or job.state not in ("queued", "delayed", "running"):
            return False
        job.reply = reply
        job.moved = True
        return True

    def reclaim(self) -> tuple[int, int, int]:
        expired = [job for job in self.running() if job.expired]
        for job in expired:
            self._reclaim(job, crashed=True, reason="lease lapsed")
        due = [job for job in self.delayed() if job.expired]
        for job in due:
            self._queue(job)
        overdue = [job for job in self.live() if job.past_deadline]
        for job in overdue:
            # A running job cannot be past its deadline here, because it would not have been
            # started.
            self._end(job, "expired", b"", "deadline")
        return len(expired), len(due), len(overdue)

    # --- Steps ------------------------------------------------------------------------------------

    def _admit(self, account: str) -> None:
        self.eligible.setdefault(account, max(self.virtual, self.finish[account]))

    def _queue(self, job: Job) -> None:
        job.state = "queued"
        self._admit(job.account)

    def _start(self, job: Job, worker: str, token: str, tag: float, *, lapses: bool) -> None:
        job.state, job.worker, job.token, job.expired = "running", worker, token, lapses
        job.attempt += 1
        job.moved = False
        self.virtual = max(self.virtual, tag)
        self.finish[job.account] = tag + job.cost_us / job.weight
        self.eligible[job.account] = self.finish[job.account]
        self._forget_idle(job.account)

    def _release(self, job: Job) -> None:
        job.state = "released"

    def _reclaim(self, job: Job, *, crashed: bool, reason: str) -> None:
        self._release(job)
        job.crashes += crashed
        if job.cancel:
            self._stop(job, job.cancel)
        elif job.crashes >= CRASHES_MAX:
            self._end(job, "dead", b"", reason)
        else:
            job.token = ""
            self._queue(job)

    def _stop(self, job: Job, reason: str) -> None:
        self._end(job, "expired" if reason == "deadline" else "cancelled", b"", reason)

    def _end(self, job: Job, status: str, outcome: bytes = b"", reason: str = "") -> None:
        job.state = status
        self.done.append((job.id, status, job.attempt, outcome, reason))
        self._forget_idle(job.account)

    def _forget_idle(self, account: str) -> None:
        if not self.waiting(account):
            self.eligible.pop(account, None)
