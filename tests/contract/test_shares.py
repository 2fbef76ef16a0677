"""Versions are chosen by weight, the same by every process."""

from __future__ import annotations

from collections import Counter

from workers.contract.shares import choose

KEYS = [f"req_{number:032x}" for number in range(4000)]


def test_each_version_is_chosen_in_proportion_to_its_weight() -> None:
    counted = Counter(choose({"old": 95, "new": 5}, key) for key in KEYS)

    assert 140 <= counted["new"] <= 260, "0.05 of 4,000, and more than four deviations around it"


def test_choice_depends_on_the_key_alone_and_keys_of_a_missing_version_are_distributed() -> None:
    weights = {"a": 1.0, "b": 2, "c": 3}
    before = {key: choose(weights, key) for key in KEYS}

    assert before == {key: choose(dict(reversed(weights.items())), key) for key in KEYS}
    after = {key: choose({"a": 1, "c": 3}, key) for key in KEYS}
    assert all(after[key] == before[key] for key in KEYS if before[key] != "b")
    assert {after[key] for key in KEYS if before[key] == "b"} == {"a", "c"}
