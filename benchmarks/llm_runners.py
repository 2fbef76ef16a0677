"""The compared runners, each in a separate process, with the same weights and threads.

    python -m benchmarks.llm_runners KIND CHECKPOINT THREADS < tasks.json

A task is a closed loop (``prompts``, ``concurrency``) or a series of arrivals (``prompts``,
``times``). The results are times, as JSON. Decoding is greedy, with exactly ``new`` tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

Tokens = list[int]
DEVICE: Final = os.environ.get("BENCH_DEVICE", "cpu")
"""Device of our engine; the others run where their libraries choose."""


class Runner(Protocol):
    def closed(self, prompts: Sequence[Tokens], new: int, concurrency: int) -> dict[str, Any]:
        """Run all with the given concurrency. Return the processor time in seconds and the
        texts."""
        ...

    def arrivals(self, prompts: Sequence[Tokens], new: int, times: Sequence[float]) -> list[Any]:
        """Run each from its time of arrival on, up to eight concurrently. Return (TTFT, TPOT) of
        each in seconds."""
        ...


def _served() -> float:
    """Return the processor time of all threads but this one, which is the client's."""
    return time.process_time() - time.thread_time()


class Ours:
    """The step loop with the engine, as in a worker."""

    def __init__(self, checkpoint: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._checkpoint = checkpoint

    def _loop(self, slots: int) -> Any:
        from workers.contract.models import ModelSpec
        from workers.engines.llm.engine import LlmEngine
        from workers.runtime.step_loop import StepLoop

        loop = StepLoop(
            worker="bench",
            now_us=lambda: time.monotonic_ns() // 1000,
            unix_ms=lambda: time.time_ns() // 1_000_000,
        )
        options = {"slots": slots, "device": DEVICE, "prefix_cache": False}
        spec = ModelSpec("m", "text-generation", "llm", self._checkpoint, options)
        loop.add("m", LlmEngine(spec))
        loop.load("m")
        return loop

    @staticmethod
    def _job(number: int, prompt: Tokens, new: int) -> Any:
        import msgspec

        from workers.contract.jobs import ChatInput, Job, RequestId

        chat = ChatInput((), new, prompts=(tuple(prompt),), temperature=0.0)
        id = RequestId(str(number))
        return Job(id, "1", "m", "text-generation", msgspec.to_builtins(chat), stream=True)

    def closed(self, prompts: Sequence[Tokens], new: int, concurrency: int) -> dict[str, Any]:
        loop = self._loop(concurrency)
        waiting = [self._job(number, prompt, new) for number, prompt in enumerate(prompts)]
        texts: dict[str, str] = {}
        started = time.process_time()
        running = 0
        while waiting or running:
            while waiting and running < concurrency:
                loop.admit(waiting.pop(0), queue_us=0, leased_us=time.monotonic_ns() // 1000)
                running += 1
            for id, outcome in loop.turn().outcomes:
                texts[id] = outcome.output["choices"][0].text
                running -= 1
        took = time.process_time() - started
        return {"seconds": took, "texts": [texts[str(n)] for n in range(len(prompts))]}

    def arrivals(self, prompts: Sequence[Tokens], new: int, times: Sequence[float]) -> list[Any]:
        loop = self._loop(8)
        jobs = [self._job(number, prompt, new) for number, prompt in enumerate(prompts)]
        found: dict[int, Any] = {}
        started = time.perf_counter()
        place = 0
        while len(found) < len(jobs):
            now = time.perf_counter() - started
            while place < len(jobs) and times[place] <= now:
                leased_us = round((started + times[place]) * 1e6)
                loop.admit(jobs[place], queue_us=0, leased_us=leased_us)
                place += 1
            if loop.idle:
                time.sleep(max(0.0, times[place] - now))
                continue
            for id, outcome in loop.turn().outcomes:
                timings = outcome.timings
                found[int(id)] = (timings.first_token_us / 1e6, timings.per_token_us / 1e6)
        return [found[number] for number in range(len(jobs))]


class LibraryForward(Ours):
    """The same engine with the forward of transformers' modules."""

    def __init__(self, checkpoint: str, threads: int) -> None:
        from workers.engines.llm import fused

        super().__init__(checkpoint, threads)
        fused.FUSED_FAMILIES = ()


class Generate:
    """Transformers' ``generate``: one by one, or in static left-padded batches."""

    def __init__(self, checkpoint: str, threads: int, *, batched: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self._batched = batched
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)

    def _run(self, prompts: Sequence[Tokens], new: int, streamer: Any = None) -> list[Tokens]:
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                streamer=streamer,
            )
        rows: list[Tokens] = out[:, longest:].tolist()
        return rows

    def closed(self, prompts: Sequence[Tokens], new: int, concurrency: int) -> dict[str, Any]:
        size = concurrency if self._batched else 1
        self._run(prompts[:1], 2)
        rows: list[Tokens] = []
        started = time.process_time()
        for start in range(0, len(prompts), size):
            rows += self._run(prompts[start : start + size], new)
        took = time.process_time() - started
        texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return {"seconds": took, "texts": texts}

    def arrivals(self, prompts: Sequence[Tokens], new: int, times: Sequence[float]) -> list[Any]:
        class Stamps:
            def __init__(self) -> None:
                self.at: list[float] = []

            def put(self, _: Any) -> None:
                self.at.append(time.perf_counter())

            def end(self) -> None: ...

        found = []
        started = time.perf_counter()
        for prompt, at in zip(prompts, times, strict=True):
            time.sleep(max(0.0, started + at - time.perf_counter()))
            stamps = Stamps()
            self._run([prompt], new, stamps)
            _, *times_s = stamps.at  # the prompt itself comes first
            found.append(
                (times_s[0] - started - at, (times_s[-1] - times_s[0]) / (len(times_s) - 1))
            )
        return found


class Manager:
    """Transformers' continuous batching manager; its startup is not measured."""

    def __init__(self, checkpoint: str, threads: int) -> None:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        configuration: Any = transformers.GenerationConfig
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self._config = configuration(
            max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0
        )

    @contextlib.contextmanager
    def _manager(self) -> Any:
        import torch
        from transformers import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=2048)
        with torch.inference_mode():
            manager = self._model.init_continuous_batching(
                generation_config=self._config, continuous_batching_config=config
            )
            manager.start()
            try:
                manager.add_request([5, 6, 7], max_new_tokens=2)
                assert manager.get_result(timeout=60) is not None
                yield manager
            finally:
                manager.stop(block=True)

    def closed(self, prompts: Sequence[Tokens], new: int, concurrency: int) -> dict[str, Any]:
        rows: dict[str, Tokens] = {}
        with self._manager() as manager:
            started = _served()
            place = 0
            while len(rows) < len(prompts):
                while place < len(prompts) and place - len(rows) < concurrency:
                    manager.add_request(prompts[place], request_id=str(place), max_new_tokens=new)
                    place += 1
                result = manager.get_result(timeout=60)
                if result is not None and result.is_finished():
                    rows[result.request_id] = list(result.generated_tokens)
            took = _served() - started
        texts = [
            self._tokenizer.decode(rows[str(n)], skip_special_tokens=True)
            for n in range(len(prompts))
        ]
        return {"seconds": took, "texts": texts}

    def arrivals(self, prompts: Sequence[Tokens], new: int, times: Sequence[float]) -> list[Any]:
        stamps: dict[str, list[float]] = {str(n): [] for n in range(len(prompts))}
        done = threading.Event()
        left = len(prompts)
        with self._manager() as manager:
            started = time.perf_counter()

            def feed() -> None:
                for number, (prompt, at) in enumerate(zip(prompts, times, strict=True)):
                    time.sleep(max(0.0, started + at - time.perf_counter()))
                    manager.add_request(
                        prompt, request_id=str(number), max_new_tokens=new, streaming=True
                    )

            threading.Thread(target=feed, daemon=True).start()
            while left and not done.is_set():
                result = manager.get_result(timeout=60)
                if result is None or result.request_id not in stamps:
                    continue
                stamps[result.request_id].append(time.perf_counter())
                left -= result.is_finished()
        return [
            (
                stamps[str(n)][0] - started - times[n],
                (stamps[str(n)][-1] - stamps[str(n)][0]) / (new - 1),
            )
            for n in range(len(prompts))
        ]


class Llama:
    """llama.cpp's server from the package ``xllamacpp``, over HTTP."""

    def __init__(self, checkpoint: str, threads: int) -> None:
        import xllamacpp  # noqa: F401

        from benchmarks.gguf import convert

        self._threads = threads
        self._file = convert(Path(checkpoint), Path(tempfile.mkdtemp()) / "model.gguf")

    def _server(self, slots: int) -> Any:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(self._file)
        params.n_parallel = slots
        params.n_ctx = slots * 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
        params.cache_prompt = False
        return xllamacpp.Server(params)

    async def _request(self, http: Any, prompt: Tokens, new: int) -> tuple[str, list[float]]:
        body = {
            "prompt": prompt,
            "n_predict": new,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        text, stamps = "", []
        async with http.stream("POST", "/completion", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line[6:])
                    if event.get("tokens") or event.get("content"):
                        stamps.append(time.perf_counter())
                    text += event.get("content", "")
        return text, stamps

    def closed(self, prompts: Sequence[Tokens], new: int, concurrency: int) -> dict[str, Any]:
        server = self._server(concurrency)

        async def run() -> tuple[float, list[str]]:
            async with _http(server, concurrency) as http:
                await self._request(http, prompts[0], 2)
                room = asyncio.Semaphore(concurrency)

                async def one(prompt: Tokens) -> str:
                    async with room:
                        return (await self._request(http, prompt, new))[0]

                started = _served()
                texts = await asyncio.gather(*map(one, prompts))
                return _served() - started, list(texts)

        seconds, texts = asyncio.run(run())
        return {"seconds": seconds, "texts": texts}

    def arrivals(self, prompts: Sequence[Tokens], new: int, times: Sequence[float]) -> list[Any]:
        server = self._server(8)

        async def run() -> list[Any]:
            async with _http(server, 64) as http:
                await self._request(http, prompts[0], 2)
                started = time.perf_counter()

                async def one(prompt: Tokens, at: float) -> Any:
                    await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
                    _, stamps = await self._request(http, prompt, new)
                    first, last = stamps[0], stamps[-1]
                    return first - started - at, (last - first) / max(1, new - 1)

                return list(
                    await asyncio.gather(
                        *(one(prompt, at) for prompt, at in zip(prompts, times, strict=True))
                    )
                )

        return asyncio.run(run())


def _http(server: Any, connections: int) -> Any:
    import httpx

    # The server sometimes closes an idle connection just as the next request arrives.
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.listening_address, timeout=300, limits=limits)


RUNNERS: Final = {
    "ours": Ours,
    "ours, library forward": LibraryForward,
    "one by one": lambda path, threads: Generate(path, threads, batched=False),
    "static": lambda path, threads: Generate(path, threads, batched=True),
    "manager": Manager,
    "llama.cpp": Llama,
}


def main() -> None:
    kind, checkpoint, threads = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    answer_to = os.dup(1)
    os.dup2(2, 1)  # keeps output of libraries out of the results
    make: Any = RUNNERS[kind]
    runner: Runner = make(checkpoint, int(threads))
    results: list[Any] = []
    for task in json.load(sys.stdin):
        if "times" in task:
            results.append(runner.arrivals(task["prompts"], task["new"], task["times"]))
        else:
            results.append(runner.closed(task["prompts"], task["new"], task["concurrency"]))
    with open(answer_to, "w") as out:
        json.dump(results, out)


if __name__ == "__main__":
    main()
