from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.runtime.fairness import DeficitRoundRobin

QUANTUM_US = 1_000

flows = st.lists(
    st.tuples(st.integers(1, 8), st.integers(1, 50_000)), min_size=2, max_size=5
)  # weight, cost of a turn


@given(flows)
def test_busy_flows_share_time_by_weight_whatever_their_turns_cost(
    described: list[tuple[int, int]],
) -> None:
    turns = DeficitRoundRobin(QUANTUM_US)
    spent = {}
    for number, (weight, _) in enumerate(described):
        turns.add(str(number), weight)
        spent[str(number)] = 0

    for _ in range(500):
        flow = turns.choose(spent.keys())
        cost = described[int(flow)][1]
        turns.spend(flow, cost)
        spent[flow] += cost

    rounds = [spent[str(n)] / weight for n, (weight, _) in enumerate(described)]
    slack = [QUANTUM_US + cost / weight for weight, cost in described]
    assert max(rounds) - min(rounds) <= 2 * max(slack)


@given(flows, st.data())
def test_every_busy_flow_gets_a_turn_within_a_limited_time(
    described: list[tuple[int, int]], data: st.DataObject
) -> None:
    turns = DeficitRoundRobin(QUANTUM_US)
    for number, (weight, _) in enumerate(described):
        turns.add(str(number), weight)
    names = [str(number) for number in range(len(described))]
    for _ in range(12):
        ready = data.draw(st.sets(st.sampled_from(names), min_size=1))
        flow = turns.choose(ready)
        assert flow in ready
        turns.spend(flow, described[int(flow)][1])

    waited = 0
    while (flow := turns.choose(names)) != names[0]:
        turns.spend(flow, described[int(flow)][1])
        waited += described[int(flow)][1]

    weight, cost = described[0]
    rounds = cost / (QUANTUM_US * weight) + 2
    others = sum(rounds * QUANTUM_US * w + c for w, c in described[1:])
    assert waited <= others


def test_a_flow_cannot_save_up_turns_while_it_has_no_work() -> None:
    turns = DeficitRoundRobin(QUANTUM_US)
    turns.add("a", 1.0)
    turns.add("b", 1.0)
    for _ in range(100):
        turns.spend(turns.choose(["a"]), QUANTUM_US)

    served = []
    for _ in range(20):
        served.append(turns.choose(["a", "b"]))
        turns.spend(served[-1], QUANTUM_US)

    assert served.count("b") in (10, 11)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_not_positive_and_finite_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        DeficitRoundRobin(QUANTUM_US).add("a", weight)


@given(flows, st.data())
def test_flow_that_is_removed_leaves_the_turns_of_the_others_in_order(
    described: list[tuple[int, int]], data: st.DataObject
) -> None:
    turns = DeficitRoundRobin(QUANTUM_US)
    flows = [str(number) for number in range(len(described))]
    for flow, (weight, _) in zip(flows, described, strict=True):
        turns.add(flow, weight)
    for _ in range(data.draw(st.integers(0, 10))):
        turns.spend(flow := turns.choose(flows), described[int(flow)][1])

    turns.remove(gone := data.draw(st.sampled_from(flows)))
    flows.remove(gone)

    chosen = set()
    for _ in range(1_000):
        turns.spend(flow := turns.choose(flows), 1_000)
        chosen.add(flow)
    assert chosen == set(flows)
