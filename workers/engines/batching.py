"""Concatenates several calls into one batch, and splits its result.

Arguments are traversed as trees of tuples, lists and mappings. A tensor whose first dimension is
the call's number of rows has one entry per row; a tensor without dimensions (a timestep) stands for
all rows and becomes one value per row if calls differ; everything else must be the same in all
calls. Pure: knows no model, thread or device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the rows of a call: the first dimension of its first tensor that has one.

    Keyword arguments that carry the batch in the libraries' models come first.
    """
    named = [kwargs[name] for name in _CARRIERS if name in kwargs]
    for value in (*args, *named, *kwargs.values()):
        first = value[0] if isinstance(value, list) and value else value
        if torch.is_tensor(first) and first.ndim:
            return len(value)
    return 1


_CARRIERS = ("hidden_states", "sample", "input_ids", "x", "z")


def signature(args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> tuple[object, ...]:
    """Return what must be equal for calls to be batched; values are compared by ``can_batch``."""
    return (_shape(tuple(args), rows), _shape(dict(kwargs), rows))


def _shape(value: Any, rows: int) -> object:
    if torch.is_tensor(value):
        if _has_rows(value, rows):
            return ("rows", tuple(value.shape[1:]), value.dtype, value.device)
        return ("same", tuple(value.shape), value.dtype, value.device)
    if isinstance(value, Mapping):
        return tuple((name, _shape(one, rows)) for name, one in sorted(value.items()))
    if isinstance(value, list | tuple):
        if _is_row_list(value, rows):
            return ("row list", *(_shape(one, 0) for one in value[:1]))
        return tuple(_shape(one, rows) for one in value)
    return repr(value)


def _has_rows(value: torch.Tensor, rows: int) -> bool:
    return value.ndim > 0 and value.shape[0] == rows


def _is_row_list(value: Any, rows: int) -> bool:
    """Whether a value is a list with one plain entry per row, such as image sizes."""
    return isinstance(value, list) and len(value) == rows and not any(map(torch.is_tensor, value))


def can_batch(first: Call, other: Call, rows: int, other_rows: int) -> bool:
    """Whether two calls of the same signature agree in everything that is not per row."""
    return _agree(first[0], other[0], rows, other_rows) and _agree(
        first[1], other[1], rows, other_rows
    )


def _agree(a: Any, b: Any, rows: int, other_rows: int) -> bool:
    if torch.is_tensor(a):
        if a.ndim == 0 or (_has_rows(a, rows) and _has_rows(b, other_rows)):
            return True
        return a is b or (a.shape == b.shape and torch.equal(a, b))
    if isinstance(a, Mapping):
        return all(_agree(one, b[name], rows, other_rows) for name, one in a.items())
    if isinstance(a, list | tuple):
        if _is_row_list(a, rows) and _is_row_list(b, other_rows):
            return True
        return len(a) == len(b) and all(
            _agree(x, y, rows, other_rows) for x, y in zip(a, b, strict=True)
        )
    return True


def concatenate(calls: Sequence[Call], rows: Sequence[int]) -> Call:
    """Build one call whose rows are those of all calls, in order."""
    args = _join([call[0] for call in calls], rows)
    kwargs = _join([call[1] for call in calls], rows)
    return args, kwargs


def _join(values: Sequence[Any], rows: Sequence[int]) -> Any:
    first = values[0]
    if torch.is_tensor(first):
        if first.ndim == 0:
            if all(torch.equal(first, value) for value in values[1:]):
                return first
            return torch.cat(
                [value.expand(count) for value, count in zip(values, rows, strict=True)]
            )
        return torch.cat(list(values)) if _has_rows(first, rows[0]) else first
    if isinstance(first, Mapping):
        return {name: _join([value[name] for value in values], rows) for name in first}
    if isinstance(first, list | tuple):
        if _is_row_list(first, rows[0]):
            return [one for value in values for one in value]
        return type(first)(
            _join([value[index] for value in values], rows) for index in range(len(first))
        )
    return first


def split(result: Any, rows: Sequence[int]) -> list[Any]:
    """Split a batch's result into the results of its calls, each of the same type."""
    total = sum(rows)
    if torch.is_tensor(result):
        if _has_rows(result, total):
            # Copies: a view would keep the whole batch alive as long as any of its rows.
            return [part.clone() for part in torch.split(result, list(rows))]
        return [result] * len(rows)
    if type(result).__name__ == "DiagonalGaussianDistribution":
        # Compared by name: importing diffusers takes seconds, and speech engines do not need it.
        distribution: Any = type(result)
        parts = torch.split(result.parameters, list(rows))
        return [distribution(part, deterministic=result.deterministic) for part in parts]
    if isinstance(result, Mapping):
        columns = {name: split(value, rows) for name, value in result.items()}
        kind: Any = type(result)
        return [
            kind(**{name: column[index] for name, column in columns.items()})
            for index in range(len(rows))
        ]
    if isinstance(result, list | tuple):
        parts_of = [split(value, rows) for value in result]
        return [type(result)(column[index] for column in parts_of) for index in range(len(rows))]
    return [result] * len(rows)
