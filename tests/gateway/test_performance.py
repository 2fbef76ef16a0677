"""Performance of a request and of a model: exact, and never revealing a single request."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from gateway.catalog.schema import Slo
from gateway.performance import ReceiptSample, missed, performance_view, summarize
from tests.stack import Stack, wait_for
from workers.contract.jobs import Timings, Usage

SLO = Slo(ttft_ms=100, tpot_ms=10)


def _seen(number: int, **changes: Any) -> ReceiptSample:
    timings = Timings(
        queue_us=number * 1000,
        first_token_us=number * 10_000,
        per_token_us=number * 1000,
        gap_us=number * 2000,
        total_us=number * 100_000,
        drafted=4,
        accepted=1,
    )
    given = {"status": "succeeded", "reason": "completed", "timings": timings, **changes}
    return ReceiptSample(settled_at=datetime.now(UTC), **given)


@pytest.mark.parametrize(
    ("timings", "bound"),
    [
        (Timings(first_token_us=100_000, per_token_us=10_000), None),
        (Timings(first_token_us=100_001, per_token_us=10_001), "ttft_ms"),
        (Timings(first_token_us=1, per_token_us=10_001), "tpot_ms"),
    ],
)
def test_slo_is_kept_at_exactly_its_bound(timings: Timings, bound: str | None) -> None:
    assert missed(SLO, timings) == bound


def test_percentiles_use_nearest_rank_and_goodput_counts_requests_within_their_slo() -> None:
    seen = [
        _seen(number, input_tokens=30, cached_input_tokens=10, output_tokens=20)
        for number in range(1, 13)
    ]
    seen += [_seen(1, status="failed", reason="engine_error")] * 3

    view = summarize(seen, SLO, 60.0, kind="text")

    assert view["requests"] == 15
    assert view["ttft_ms"] == {"p50": 60.0, "p90": 110.0, "p95": 120.0, "p99": 120.0}
    assert view["tpot_ms"] == {"p50": 6.0, "p90": 11.0, "p95": 12.0, "p99": 12.0}
    assert view["longest_gap_ms"]["p50"] == 12.0
    assert view["queue_ms"]["p50"] == 6.0
    assert view["output_tokens_per_second"] == 4.0
    assert view["cached_share"] == 0.25
    assert view["acceptance_rate"] == 0.25
    assert view["not_succeeded"] == {"engine_error": 0.2}
    assert view["goodput"] == {"share": round(10 / 15, 4), "requests_per_second": round(1 / 6, 4)}


def test_image_models_have_statistics_of_steps_and_outputs() -> None:
    def drawn(number: int, **changes: Any) -> ReceiptSample:
        timings = Timings(
            queue_us=number * 1000, forward_us=number * 40_000, total_us=number * 100_000
        )
        return _seen(number, **{"timings": timings, "images": 2, "steps": 8, **changes})

    seen = [drawn(number) for number in range(1, 11)]
    # An upstream's requests have no steps, and what failed made nothing.
    seen += [drawn(1, steps=0, images=1, video_ms=1500), drawn(1, status="failed", reason="oom")]

    view = summarize(seen, Slo(total_ms=500), 100.0, kind="visual")

    assert view["step_ms"] == {"p50": 25.0, "p90": 45.0, "p95": 50.0, "p99": 50.0}
    assert view["forward_ms"] == {"p50": 200.0, "p90": 360.0, "p95": 400.0, "p99": 400.0}
    assert view["total_ms"]["p95"] == 1000.0
    assert view["queue_ms"]["p50"] == 5.0
    assert (view["images"], view["steps"], view["images_per_second"]) == (21, 80, 0.21)
    assert view["images_per_request"] == round(21 / 11, 4)
    assert (view["video_seconds"], view["video_seconds_per_second"]) == (1.5, 0.015)
    assert view["not_succeeded"] == {"oom": round(1 / 12, 4)}
    assert view["goodput"] == {"share": 0.5, "requests_per_second": 0.06}
    assert not {"ttft_ms", "tpot_ms", "output_tokens_per_second"} & set(view)


def test_speech_models_have_statistics_of_ttfa_and_real_time_factor() -> None:
    def spoken(number: int) -> ReceiptSample:
        timings = Timings(
            queue_us=100_000,
            load_us=50_000,
            forward_us=1,
            first_token_us=number * 10_000,
            gap_us=number * 1000,
            total_us=150_000 + number * 100_000,
        )
        return _seen(number, timings=timings, audio_ms=2000, characters=30)

    view = summarize(
        [spoken(number) for number in range(1, 11)],
        Slo(first_audio_ms=50),
        100.0,
        kind="audio",
    )

    assert view["first_audio_ms"] == {"p50": 50.0, "p90": 90.0, "p95": 100.0, "p99": 100.0}
    assert view["real_time_factor"] == {"p50": 0.25, "p90": 0.45, "p95": 0.5, "p99": 0.5}
    assert (view["audio_seconds"], view["audio_seconds_per_second"]) == (20.0, 0.2)
    assert (view["characters"], view["characters_per_second"]) == (300, 3.0)
    assert view["goodput"] == {"share": 0.5, "requests_per_second": 0.05}


def test_few_requests_give_only_their_count() -> None:
    failed = [_seen(1, status="failed", reason="engine_error")] * 9
    view = summarize([_seen(1)] * 4 + failed, SLO, 60.0, kind="text")

    assert set(view) == {"requests", "capped", "slo"}


def test_receipt_has_the_slo_and_whether_it_was_kept() -> None:
    view = performance_view(
        Timings(first_token_us=50_000, per_token_us=20_000, gap_us=90_000, drafted=8, accepted=6),
        SLO,
        succeeded=True,
        task="text-generation",
        usage=Usage(),
    )

    assert view == {
        "ttft_ms": 50.0,
        "tpot_ms": 20.0,
        "longest_gap_ms": 90.0,
        "tokens_per_second": 50.0,
        "slo": {"ttft_ms": 100, "tpot_ms": 10, "met": False, "missed": "tpot_ms"},
        "speculation": {"drafted": 8, "accepted": 6, "rate": 0.75},
    }


def test_stats_and_receipts_over_http(stack: Stack) -> None:
    client = stack.caller().http
    ids = []
    for number in range(6):
        answer = client.post(
            "/v1/chat/completions",
            json={
                "model": "slow",
                "messages": [{"role": "user", "content": f"one two three {number}"}],
            },
        )
        assert answer.status_code == 200, answer.text
        ids.append(answer.headers["X-Request-Id"])

    receipt = client.get(f"/v1/requests/{ids[0]}/receipt").json()
    stats = client.get("/v1/models/slow/stats", params={"window": "15m"}).json()

    performance = receipt["performance"]
    assert 0 < performance["tpot_ms"] <= performance["longest_gap_ms"]
    assert performance["ttft_ms"] * 1000 == receipt["timings"]["first_token_us"]
    assert performance["tpot_ms"] >= 50
    assert performance["slo"] == {
        "ttft_ms": 10000,
        "tpot_ms": 1,
        "met": False,
        "missed": "tpot_ms",
    }
    assert stats["requests"] >= 6
    assert 0 < stats["ttft_ms"]["p50"] <= stats["ttft_ms"]["p99"]
    # Whatever else ran there, these six did not keep the promise.
    assert 0 <= stats["goodput"]["share"] <= 1 - 6 / stats["requests"]
    metrics = client.get("/metrics").text
    assert 'tollgate_ttft_seconds_count{model="slow"}' in metrics
    assert 'tollgate_tokens_total{kind="output",model="slow"}' in metrics


def test_image_models_have_stats_receipts_and_metrics(media_stack: Stack) -> None:
    client = media_stack.caller().http
    before = _counted(client.get("/metrics").text)
    ids = []
    for _ in range(5):
        answer = client.post(
            "/v1/images/generations", json={"model": "pocket", "prompt": "x", "n": 2}
        )
        ids.append(answer.json()["id"])
    film = client.post("/v1/videos", json={"model": "film", "prompt": "x", "seconds": 3}).json()
    wait_for(lambda: _video(client, film)["status"] in ("completed", "failed"), "the video")
    assert _video(client, film)["status"] == "completed", _video(client, film)

    receipt = client.get(f"/v1/requests/{ids[0]}/receipt").json()
    stats = client.get("/v1/models/pocket/stats", params={"window": "15m"}).json()

    assert receipt["performance"] == {
        "queue_ms": 0.0,
        "forward_ms": 80.0,
        "step_ms": 20.0,
        "total_ms": receipt["timings"]["total_us"] / 1000,
        "slo": {"total_ms": 60_000, "met": True, "missed": None},
    }
    assert stats["slo"] == {"total_ms": 60_000}
    assert stats["images"] >= 10
    assert stats["step_ms"]["p50"] == 20.0
    assert 0 < stats["total_ms"]["p50"] <= stats["total_ms"]["p95"]
    assert stats["goodput"]["share"] > 0
    wait_for(
        lambda: (
            _counted(client.get("/metrics").text)["film", "video_second"]
            >= before["film", "video_second"] + 2.999
        ),
        "the video's seconds",
    )
    after = _counted(client.get("/metrics").text)
    assert after["pocket", "image"] == before["pocket", "image"] + 10
    assert after["pocket", "step"] == before["pocket", "step"] + 20
    text = client.get("/metrics").text
    assert 'tollgate_step_seconds_count{model="pocket"}' in text
    assert 'tollgate_total_seconds_count{model="pocket"}' in text


def _video(client: httpx.Client, film: dict[str, Any]) -> dict[str, Any]:
    """As it is now; ``film`` is what its order was answered with."""
    seen: dict[str, Any] = client.get(f"/v1/videos/{film['id']}").json()
    return seen


def _counted(text: str) -> Mapping[tuple[str, str], float]:
    """What was delivered: (model, kind) → how many."""
    found = re.findall(
        r'^tollgate_delivered_total{kind="(\w+)",model="(\w+)"} (\S+)$', text, re.MULTILINE
    )
    return defaultdict(float, {(model, kind): float(count) for kind, model, count in found})


def test_statistics_of_an_unknown_model_or_window_are_refused(stack: Stack) -> None:
    client = stack.caller().http

    unknown = client.get("/v1/models/no/such/stats")
    window = client.get("/v1/models/slow/stats", params={"window": "2h"})

    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert window.status_code == 400
