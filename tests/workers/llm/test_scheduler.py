"""Slots are never shared, prompts are read in order and in pieces of their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.contract.jobs import RequestId
from workers.engines.llm.scheduler import PIECE_TOKENS, STEP_TOKENS, Plan, Scheduler, Seat

SLOTS = 6
_prompt_tokens = st.one_of(st.integers(1, 40), st.integers(1, 5000))
_moves = st.lists(
    st.one_of(
        st.tuples(st.just("seat"), st.integers(1, 3), _prompt_tokens),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("halt"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


def _check(plan: Plan) -> None:
    assert sum(piece.stop - piece.start for piece in plan.pieces) <= STEP_TOKENS
    assert not {piece.seat for piece in plan.pieces} & set(plan.writers)
    reached: dict[Seat, int] = {}
    for piece in plan.pieces:
        assert piece.start == reached.get(piece.seat, piece.seat.read)
        assert piece.start % PIECE_TOKENS == 0
        assert piece.stop - piece.start == PIECE_TOKENS or piece.is_last
        reached[piece.seat] = piece.stop
    for seat in plan.writers:
        assert seat.read == seat.prompt_tokens


@given(_moves)
def test_any_order_of_events_keeps_the_rules(moves: list[tuple[str, int, int]]) -> None:
    scheduler = Scheduler(SLOTS)
    seats: dict[RequestId, Seat] = {}
    halted: set[RequestId] = set()
    for number, (move, size, tokens) in enumerate(moves):
        there = list(seats)
        if move == "seat":
            id = RequestId(str(number))
            free = SLOTS - sum(len(seat.slots) for seat in seats.values())
            seat = scheduler.seat(id, choices=size, prompt_tokens=tokens)
            assert (seat is not None) == (size <= free)
            if seat is not None:
                taken = {slot for other in seats.values() for slot in other.slots}
                assert len(set(seat.slots) - taken) == size
                assert set(seat.slots) <= set(range(SLOTS))
                seats[id] = seat
        elif move == "step":
            plan = scheduler.plan()
            assert plan == scheduler.plan(), "planning changes nothing"
            _check(plan)
            going = [seats[id] for id in there if id not in halted]
            assert {seat for seat in going if seat.read == seat.prompt_tokens} == set(plan.writers)
            unread = [seat for seat in going if seat.read < seat.prompt_tokens]
            order = list(dict.fromkeys(piece.seat for piece in plan.pieces))
            assert order == unread[: len(order)]
            assert bool(order) == bool(unread)
            scheduler.advance(plan)
        elif there and move == "halt":
            halted.add(there[size % len(there)])
            scheduler.halt(there[size % len(there)])
        elif there and move == "leave":
            scheduler.leave(there[size % len(there)])
            del seats[there[size % len(there)]]


def test_short_prompts_are_read_together() -> None:
    scheduler = Scheduler(8)
    for number in range(8):
        scheduler.seat(RequestId(str(number)), choices=1, prompt_tokens=30)

    assert len(scheduler.plan().pieces) == 8
