"""Every example runs, in Python and in JavaScript, against the installation of the pages.

One test for each language, so that few processes of the tests start that installation.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.conftest import Sandbox
from tests.docs.pages import ROOT

EXAMPLES: Final = ROOT / "docs" / "examples"
SHARED: Final = "tollgate"
"""Name of the file that other examples import."""
NAMES: Final = sorted(
    path.stem for path in (EXAMPLES / "python").glob("*.py") if path.stem != SHARED
)
SAVED: Final = {
    "pictures": ("picture.png", "edited.png"),
    "video": ("video.mp4",),
    "voice_clone": ("cloned.wav",),
    "music": ("waltz.mp3",),
    "workflow": ("talking.mp4",),
}
SAID: Final = {
    "chat": "for request req_",
    "tools": "the model calls get_weather(",
    "budget_guard": "stopped after 2 pictures: ",
    "webhook_receiver": " of req_",
}
MARK: Final = "--- example ---"
RUN_ALL: Final = f"""\
import runpy, sys
for path in sys.argv[1:]:
    print({MARK!r})
    runpy.run_path(path, run_name="__main__")
"""
"""Runs examples in one process, because importing a client takes longer than most of them."""
NODE: Final = shutil.which("node")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def place(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to run in, with the environment that examples read."""
    monkeypatch.setenv("TOLLGATE_URL", f"http://127.0.0.1:{sandbox.port}")
    for name, value in sandbox.keys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(name: str, said: str, place: Path) -> None:
    assert SAID.get(name, "saved ") in said
    for file in SAVED.get(name, ()):
        assert (place / file).stat().st_size > 1000


def test_both_languages_have_the_same_examples() -> None:
    assert sorted(path.stem for path in (EXAMPLES / "javascript").iterdir()) == sorted(
        [*NAMES, SHARED]
    )


def test_python_examples_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES / "python"))
    files = [str(EXAMPLES / "python" / f"{name}.py") for name in NAMES]

    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *files],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for name, said in zip(NAMES, done.stdout.split(MARK)[1:], strict=True):
        check(name, said, place)


@pytest.mark.skipif(NODE is None, reason="the JavaScript examples need node, which is not here")
def test_javascript_examples_run(place: Path) -> None:
    assert NODE is not None

    for name in NAMES:
        done = subprocess.run(
            [NODE, str(EXAMPLES / "javascript" / f"{name}.mjs")],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=120,
        )

        assert done.returncode == 0, f"{name}: {done.stderr}"
        check(name, done.stdout, place)
