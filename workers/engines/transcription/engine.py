"""The engine of ``speech-to-text``: a step encodes new windows for a slice of time, and decodes one
token of each that is encoded.

A window depends on nothing but its own recording, so a text does not depend on other requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from workers.contract.jobs import Cancelled, Event, Job, Outcome, RequestId, Tokens
from workers.contract.media import TranscriptionInput
from workers.contract.models import ModelSpec
from workers.engines.interrupting import SlicedCall
from workers.engines.memory import memory_of
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, read_input, reading
from workers.engines.transcription.checkpoint import CheckpointLayout, Transcriber
from workers.engines.transcription.constraints import constrain
from workers.engines.transcription.network import Encoded
from workers.engines.transcription.options import Options, read_options
from workers.engines.transcription.request import TranscriptionRequest
from workers.media.recordings import read_audio
from workers.protocol.engine import Inspected, Memory, PhaseClock, StepReport

SECONDS_MAX = 4 * 3600.0
"""Maximum duration of a recording of a request without a limit, in seconds."""
_TOLERANCE_S = 1.0
"""How much longer a recording may be than its header says, on which the hold is based."""
_BYTES_MAX = 1024 * 1024 * 1024
"""Maximum size of a recording; the gateway's own limit is lower."""


class TranscriptionEngine(TorchEngine[Options, Transcriber, TranscriptionRequest]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._rows: list[TranscriptionRequest] = []
        self._encoding: SlicedCall[Sequence[TranscriptionRequest], Encoded] | None = None

    @property
    def memory(self) -> Memory:
        cache_bytes = self._loaded.network.cache_bytes if self._loaded else 0
        return memory_of(self._options.torch_device, self._weights_bytes, cache_bytes)

    def _inspect(self) -> Inspected | None:
        CheckpointLayout(self._spec)
        return None

    def _load(self) -> Transcriber:
        transcriber = Transcriber(self._spec, self._options)
        network = transcriber.network
        self._choose_threads(network.model)
        with torch.inference_mode():
            bands = int(network.model.config.num_mel_bins)
            row = network.add_row(network.encode([torch.zeros(bands, network.frames)]), 0)
            network.prefill(row, [transcriber.special.start])
            network.free(row)
        return transcriber

    def prepare(self, job: Job, files: Sequence[bytes]) -> object:
        """Decode the recording of a job and compute its features."""
        return self._prepare(job, files)

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        weights: dict[RequestId, float] = {}
        with clock.phase("forward"):
            self._drop_cancelled()
            requests, encoded = self._encode_windows(weights)
            with torch.inference_mode():
                if encoded is not None:
                    self._begin_windows(requests, encoded, weights)
                self._advance(weights)
                self._model.network.wait()
        with clock.phase("postprocess"):
            events: list[tuple[RequestId, Event]] = []
            outcomes: list[tuple[RequestId, Outcome]] = []
            for id, request in self._running.items():
                if request.cancelled is not None:
                    outcomes.append((id, Cancelled(request.cancelled, usage=request.usage())))
                    continue
                if (event := request.take_event()) is not None:
                    events.append((id, event))
                if request.done:
                    events.append((id, Tokens(0, "", 0, finish_reason="stop")))
                    outcomes.append((id, request.completed()))
        return StepReport(weights or dict.fromkeys(self._running, 1.0), events, outcomes)

    def release(self, request_id: RequestId) -> None:
        self._drop_row(self._running.pop(request_id))
        self._abandon_encoding()

    # --- Input ------------------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> TranscriptionRequest:
        input = read_input(job, TranscriptionInput)
        transcriber, special = self._model, self._model.special
        if len(files) != 1:
            raise InputError("invalid_input", f"{self._spec.name} needs a recording.", "audio")
        language = self._language(input)
        if input.translate and "translate" not in special.tasks:
            raise InputError(
                "unsupported_parameter", f"{self._spec.name} does not translate.", "translate"
            )
        if "word" in input.timestamps and not special.alignment_heads:
            message = f"{self._spec.name} has no timestamps of words; ask for segments."
            raise InputError("unsupported_parameter", message, "timestamps")
        if input.timestamps and special.no_timestamps is None:
            message = f"{self._spec.name} has no timestamps."
            raise InputError("unsupported_parameter", message, "timestamps")
        if input.prompt and special.previous is None:
            raise InputError(
                "unsupported_parameter", f"{self._spec.name} takes no prompt.", "prompt"
            )
        held_ms = job.limits.audio_ms
        seconds = held_ms / 1000 + _TOLERANCE_S if held_ms else SECONDS_MAX
        with reading("audio"):
            audio = read_audio(
                files[0], rate=transcriber.rate, seconds_max=seconds, bytes_max=_BYTES_MAX
            )
        features, frames = transcriber.features(audio)
        is_long = features.shape[-1] > transcriber.network.frames
        if is_long and special.no_timestamps is None:
            seconds = transcriber.network.frames // 100
            message = f"{self._spec.name} reads recordings of at most {seconds} s."
            raise InputError("invalid_input", message, "audio")
        duration_ms = -(-audio.samples.shape[1] * 1000 // transcriber.rate)
        room = transcriber.network.positions // 2 - 2
        return TranscriptionRequest(
            job.request_id,
            input,
            transcriber,
            features,
            frames,
            min(duration_ms, held_ms) if held_ms else duration_ms,
            language,
            transcriber.encode(input.prompt)[-room:] if input.prompt else [],
            timestamps=bool(input.timestamps) or is_long,
            generator=torch.Generator().manual_seed(input.seed),
        )

    def _language(self, input: TranscriptionInput) -> str | None:
        if not input.language:
            return None
        special = self._model.special
        found = special.find_language(input.language)
        if found is None and special.languages:
            known = ", ".join(sorted(special.languages))
            message = f"language is {input.language!r}; {self._spec.name} knows {known}."
            raise InputError("unsupported_parameter", message, "language")
        return found

    # --- Steps ------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        for request in [one for one in self._rows if one.cancelled is not None]:
            self._drop_row(request)
        self._abandon_encoding()

    def _abandon_encoding(self) -> None:
        """Abandon windows that no request waits for."""
        if self._encoding is not None and not any(map(self._is_active, self._encoding.rows)):
            self._encoding.abandon()
            self._encoding = None

    def _is_active(self, request: TranscriptionRequest) -> bool:
        return request.cancelled is None and self._running.get(request.request_id) is request

    def _encode_windows(
        self, weights: dict[RequestId, float]
    ) -> tuple[Sequence[TranscriptionRequest], Encoded | None]:
        """Encode the next windows of a few requests for a slice of time. Return the requests, and
        the windows if they are encoded."""
        call, self._encoding = self._encoding, None
        if call is None:
            waiting = [
                request
                for request in self._running.values()
                if request.window is None and request.cancelled is None and not request.done
            ][: self._options.windows]
            if not waiting:
                return (), None
            windows = [self._model.window(one.features, one.seek) for one in waiting]
            call = SlicedCall(waiting, lambda: self._model.network.encode(windows))
        spent_s = call.spent_s
        encoded = call.run_slice()
        _share(weights, filter(self._is_active, call.rows), call.spent_s - spent_s)
        if encoded is None:
            self._encoding = call
        return call.rows, encoded

    def _begin_windows(
        self,
        requests: Sequence[TranscriptionRequest],
        encoded: Encoded,
        weights: dict[RequestId, float],
    ) -> None:
        """Give encoded windows their rows, and run their first tokens."""
        started_s = time.monotonic()
        active = []
        for window, request in enumerate(requests):
            if self._is_active(request):
                request.begin(self._model.network.add_row(encoded, window))
                self._rows.append(request)
                active.append(request)
        try:
            for request in active:
                self._run_prefix(request)
        except BaseException:
            for request in active:
                if request.window is not None and not request.window.tokens:
                    self._drop_row(request)
            raise
        _share(weights, active, time.monotonic() - started_s)

    def _run_prefix(self, request: TranscriptionRequest) -> None:
        """Run the first tokens of a new window, after detecting the language if it is unknown."""
        network, special, window = self._model.network, self._model.special, request.window
        assert window is not None
        if request.language is None and special.languages:
            scores = network.prefill(window.row, [special.start])[-1]
            codes = list(special.languages)
            known = scores[[special.languages[code] for code in codes]]
            request.language = codes[int(known.argmax())]
        prefix = request.set_prefix()
        scores = network.prefill(window.row, prefix)
        if special.no_timestamps is not None:
            start = scores[prefix.index(special.start)]
            window.no_speech = float(start.softmax(-1)[special.no_timestamps - 1])
        self._take(request, scores[-1])

    def _advance(self, weights: dict[RequestId, float]) -> None:
        """Decode one token of every window."""
        if not self._rows:
            return
        started_s = time.monotonic()
        tokens, places = [], []
        for request in self._rows:
            window = request.window
            assert window is not None
            tokens.append(window.tokens[-1])
            places.append(len(window.prefix) + len(window.tokens) - 1)
        scores = self._model.network.advance(tokens, places)
        rows = list(self._rows)
        for request, own in zip(rows, scores, strict=True):
            self._take(request, own)
        _share(weights, rows, time.monotonic() - started_s)

    def _take(self, request: TranscriptionRequest, scores: torch.Tensor) -> None:
        """Choose a window's next token; end the window if it is its last."""
        window = request.window
        assert window is not None
        constrain(scores, window.tokens, self._model.special, timestamps=request.timestamps)
        if request.append(request.choose(scores)):
            request.end_window()
            self._free(window.row)

    def _drop_row(self, request: TranscriptionRequest) -> None:
        if request.window is not None:
            row, request.window = request.window.row, None
            self._free(row)

    def _free(self, row: int) -> None:
        """Free a row; the last one moves there."""
        last = self._model.network.free(row)
        moved = self._rows.pop()
        if row != last:
            self._rows[row] = moved
            assert moved.window is not None
            moved.window.row = row


def _share(
    weights: dict[RequestId, float], requests: Iterable[TranscriptionRequest], spent_s: float
) -> None:
    """Add equal shares of a time to the weights of the requests for which it was spent."""
    ids = [request.request_id for request in requests]
    for id in ids:
        weights[id] = weights.get(id, 0.0) + spent_s / len(ids)
