"""The steps of a workflow as a graph: what each waits for, from top to bottom. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Final

from gateway.catalog.workflow import Workflow, dependencies, references

WIDTH: Final = 168
HEIGHT: Final = 56
GAP_X: Final = 16
GAP_Y: Final = 28
MARGIN: Final = 2
INPUTS: Final = ""
"""The node of all inputs; no step has this name."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A step, or all inputs together; ``name`` is empty for these, which do not run."""

    name: str
    title: str
    detail: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """From the bottom of one node to the top of another."""

    x1: int
    y1: int
    x2: int
    y2: int


@dataclass(frozen=True, slots=True)
class WorkflowGraph:
    width: int
    height: int
    nodes: Sequence[GraphNode]
    edges: Sequence[GraphEdge]


def workflow_graph(workflow: Workflow) -> WorkflowGraph:
    """Place each step below all that it waits for, and what the client sends on top."""
    before = _sources(workflow)
    levels: dict[str, int] = {}
    for key in TopologicalSorter(before).static_order():
        levels[key] = 1 + max((levels[each] for each in before.get(key, ())), default=-1)
    rows: defaultdict[int, list[str]] = defaultdict(list)
    for key in before:
        rows[levels[key]].append(key)
    widest = max(map(len, rows.values()))
    width = widest * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    places = {
        key: (
            (width - len(row) * (WIDTH + GAP_X) + GAP_X) // 2 + place * (WIDTH + GAP_X),
            MARGIN + level * (HEIGHT + GAP_Y),
        )
        for level, row in rows.items()
        for place, key in enumerate(row)
    }
    models = {step.name: step.model for step in workflow.steps}
    nodes = []
    for key, (x, y) in places.items():
        if key == INPUTS:
            nodes.append(GraphNode("", "inputs", ", ".join(workflow.inputs), x, y))
        else:
            nodes.append(GraphNode(key, key, models[key], x, y))
    edges = [
        GraphEdge(
            places[each][0] + WIDTH // 2,
            places[each][1] + HEIGHT,
            places[key][0] + WIDTH // 2,
            places[key][1],
        )
        for key, waits in before.items()
        for each in sorted(waits)
    ]
    height = len(rows) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    return WorkflowGraph(width, height, nodes, edges)


def _sources(workflow: Workflow) -> Mapping[str, set[str]]:
    """Return the steps that each step reads, and ``INPUTS`` if it reads an input."""
    found: dict[str, set[str]] = {INPUTS: set()}
    for name, steps in dependencies(workflow).items():
        step = next(each for each in workflow.steps if each.name == name)
        read = [each for _, expression in references(step.input) for each in expression]
        has_inputs = any(each.source == "inputs" for each in read)
        found[name] = steps | ({INPUTS} if has_inputs else set())
    return found
