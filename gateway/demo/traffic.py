"""Orders today's requests through the gateway's own API, as the accounts' programs would."""

from __future__ import annotations

import io
import json
import wave
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from gateway.demo.door import Door, Refused, data_uri
from gateway.demo.people import Opened
from gateway.demo.script import DemoOrder, Script, read_portrait

TOGETHER: Final = 4
"""Requests under way at a time."""
SILENCE_S: Final = 2
RATE: Final = 16_000


@dataclass(frozen=True)
class OrderEnd:
    """How an order ended: a request with its status, or a refusal with its code."""

    order: DemoOrder
    status: str
    request_id: str | None = None
    cost: str = "0"


class Traffic:
    def __init__(
        self,
        door: Door,
        script: Script,
        opened: Mapping[str, Opened],
        models: Collection[str],
        report: Callable[[str], None],
    ) -> None:
        """``models`` are those that a worker serves; orders of others are left out."""
        self._door = door
        self._script = script
        self._opened = opened
        self._models = models
        self._report = report
        self._files = {
            "portrait": data_uri(read_portrait(), "image/png"),
            "silence": data_uri(_silence(), "audio/wav"),
        }

    def run(self) -> list[OrderEnd]:
        """Order everything; return how each order ended."""
        chosen = [order for order in self._script.orders if order.model in self._models]
        ended = [self._order(order, 0) for order in chosen if order.keep is not None]
        self._keep_voice()
        rest = [
            (order, number)
            for order in chosen
            if order.keep is None and self._needs(order) <= set(self._files)
            for number in range(order.times)
        ]
        # Refusals come when budgets and credit are spent: one after the other, at the end.
        together = [each for each in rest if each[0].ends != "refused"]
        with ThreadPoolExecutor(TOGETHER) as pool:
            batch = pool.submit(self._batch)
            ended += pool.map(lambda each: self._order(*each), together)
            batch.result()
        ended += [self._order(*each) for each in rest if each[0].ends == "refused"]
        counts = Counter((one.order.model, one.status) for one in ended)
        for model in dict.fromkeys(one.order.model for one in ended):
            ends = ", ".join(f"{n} {status}" for (of, status), n in counts.items() if of == model)
            self._report(f"  {model}: {ends}")
        return ended

    def _order(self, order: DemoOrder, number: int) -> OrderEnd:
        secret = self._secret(order.account, order.key)
        prompt = order.prompts[number % len(order.prompts)] if order.prompts else ""
        body: dict[str, Any] = {
            "model": order.model,
            "input": _filled(order.input, {**self._files, "prompt": prompt}),
        }
        if order.tag is not None:
            body["metadata"] = {"project": order.tag}
        if order.webhook is not None:
            body["webhook"] = order.webhook
        made = self._door.order(secret, body)
        if isinstance(made, Refused):
            return OrderEnd(order, f"refused ({made.code})")
        if order.ends == "cancelled":
            self._door.wait_until_running(secret, made)
            self._door.cancel(secret, made)
        done = self._door.wait(secret, made)
        if order.keep is not None and done["status"] == "succeeded":
            self._files[order.keep] = self._door.output(done)
        return OrderEnd(order, str(done["status"]), made, str(done.get("cost") or "0"))

    def _keep_voice(self) -> None:
        """Store a voice with a consent: what was spoken before serves as both recordings."""
        wanted = self._script.voice
        if wanted.model not in self._models or "speech" not in self._files:
            return
        secret, recording = self._secret(wanted.account, wanted.key), self._files["speech"]
        consent = {"name": wanted.consent, "language": "en-US", "recording": recording}
        given = self._door.call("POST", "/v1/audio/voice_consents", secret, consent)
        voice = {"name": wanted.name, "consent": given["id"], "audio_sample": recording}
        made = self._door.call("POST", "/v1/audio/voices", secret, voice)
        self._files["voice"] = str(made["id"])

    def _batch(self) -> None:
        wanted = self._script.batch
        if wanted.model not in self._models:
            return
        secret, endpoint = self._secret(wanted.account, wanted.key), "/v1/chat/completions"
        lines = "".join(
            json.dumps(
                {
                    "custom_id": f"page-{number}",
                    "method": "POST",
                    "url": endpoint,
                    "body": {
                        "model": wanted.model,
                        "max_tokens": 60,
                        "messages": [{"role": "user", "content": prompt}],
                    },
                }
            )
            + "\n"
            for number, prompt in enumerate(wanted.prompts, 1)
        )
        file = self._door.call(
            "POST",
            "/v1/files",
            secret,
            data={"purpose": "batch"},
            files={"file": ("questions.jsonl", lines.encode())},
        )
        body = {
            "input_file_id": file["id"],
            "endpoint": endpoint,
            "completion_window": "24h",
            "metadata": {"project": "catalogue"},
        }
        made = self._door.call("POST", "/v1/batches", secret, body)
        unfinished = ("validating", "in_progress", "finalizing")
        self._door.wait_for(secret, f"/v1/batches/{made['id']}", unfinished)

    def _secret(self, account: str, key: str) -> str:
        return self._opened[account].secrets[key]

    def _needs(self, order: DemoOrder) -> set[str]:
        """Return the files that an order refers to."""
        return {name for name in _references(order.input) if name != "prompt"}


def _filled(value: Any, files: Mapping[str, str]) -> Any:
    """Replace each ``$name`` by its file or prompt."""
    if isinstance(value, Mapping):
        return {name: _filled(one, files) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_filled(one, files) for one in value]
    if isinstance(value, str) and value.startswith("$"):
        return files[value[1:]]
    return value


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        if value.startswith("$"):
            yield value[1:]
    elif isinstance(value, Sequence):
        for one in value:
            yield from _references(one)


def _silence() -> bytes:
    """Return a recording in which nobody speaks, as WAV."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes(bytes(2 * RATE * SILENCE_S))
    return file.getvalue()
