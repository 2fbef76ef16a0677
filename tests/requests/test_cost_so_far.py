"""What a stream costs while it runs."""

from __future__ import annotations

from gateway.pricing import Component, Price, charge
from gateway.requests.incremental_holds import CostSoFar
from workers.contract.jobs import RequestId, SentEvent, Started, Tokens, Usage

PRICE = Price((Component("input_token", 20, 1000), Component("output_token", 80, 1000)))
LIMITS = Usage(requests=1, input_tokens=50, output_tokens=100)
READ = Usage(requests=1, input_tokens=28, output_tokens=1)


def sent(seq: int, count: int, *, attempt: int = 1, usage: Usage | None = None) -> SentEvent:
    return SentEvent(RequestId("req"), attempt, seq, Tokens(0, "x" * count, count, usage=usage))


def test_cost_so_far_is_the_charge_of_what_was_produced() -> None:
    cost = CostSoFar(PRICE, LIMITS)

    cost.count(SentEvent(RequestId("req"), 1, 1, Started("w", 1)))
    assert (cost.nanos, cost.tokens) == (0, 0)
    cost.count(sent(2, 1, usage=READ))
    cost.count(sent(3, 32))

    assert cost.tokens == 33
    assert cost.nanos == charge(PRICE, Usage(input_tokens=28, output_tokens=33)).total_nanos


def test_cost_so_far_neither_falls_nor_exceeds_the_quote() -> None:
    cost, found = CostSoFar(PRICE, LIMITS), []

    for attempt, counts in ((1, (1, 60)), (2, (1, 10, 300))):
        for seq, count in enumerate(counts, start=1):
            cost.count(sent(seq, count, attempt=attempt, usage=READ if seq == 1 else None))
            found.append(cost.nanos)

    assert found == sorted(found)
    assert found[-1] == charge(PRICE, Usage(input_tokens=28, output_tokens=100)).total_nanos
    assert found[-1] <= cost.most_nanos
