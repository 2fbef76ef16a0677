"""Runs the ``tollgate`` command in this process, since starting Python takes longer than most
commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from unittest import mock

import click
from click.testing import CliRunner, Result

from gateway.__main__ import main


@click.command()
def _script() -> None:
    main()


def run_here(arguments: tuple[str, ...], environment: Mapping[str, str | None]) -> Result:
    """Run the console script with changes to the environment; None removes a variable."""
    with mock.patch.object(sys, "argv", ["tollgate", *arguments]):
        done = CliRunner().invoke(_script, [], env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done
