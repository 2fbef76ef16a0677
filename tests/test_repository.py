"""Rules of the repository that no other tool checks."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import get_args

from gateway.errors import FAILURE_STATUS
from gateway.pricing import UNITS
from gateway.tables.core import QUANTITIES
from tests.mutations import MUTATIONS
from workers.contract.jobs import FailureCode, Usage

ROOT = Path(__file__).parents[1]


def test_the_gateway_starts_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        "import gateway.app, gateway.__main__"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_agent_starts_where_neither_torch_nor_a_web_framework_is() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'litestar', 'sqlalchemy'))); "
        "import workers.__main__, workers.runtime.process"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_way_in_which_a_worker_fails_has_a_status() -> None:
    assert set(FAILURE_STATUS) == set(get_args(FailureCode))
    assert all(400 <= status < 500 for status in FAILURE_STATUS.values())


def test_every_quantity_of_a_usage_has_a_unit_of_price_and_a_column() -> None:
    measured = set(Usage.__struct_fields__) - {"attributes"}

    assert measured == {"requests", *QUANTITIES}
    assert len(UNITS) == len(measured)


SOURCES = [
    path for top in ("gateway", "workers", "training") for path in (ROOT / top).rglob("*.py")
]


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > 500
    }

    assert long == {}


def test_no_folder_has_more_modules_than_a_reader_can_hold() -> None:
    count = Counter(path.parent for path in SOURCES if path.name != "__init__.py")

    assert {str(path.relative_to(ROOT)): n for path, n in count.items() if n > 20} == {}


SHARED_NAMES = {"Options"}
"""Each engine's own options; no module reads those of two."""


def test_a_class_name_means_one_thing_in_a_package() -> None:
    for top in ("gateway", "workers"):
        homes: defaultdict[str, list[str]] = defaultdict(list)
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(str(path.relative_to(ROOT)))

        twice = {name: found for name, found in homes.items() if len(found) > 1}
        assert {name: found for name, found in twice.items() if name not in SHARED_NAMES} == {}


def test_the_mistakes_that_tests_must_notice_fit_the_source() -> None:
    for mutation in MUTATIONS:
        source = (ROOT / mutation.file).read_text()
        assert source.count(mutation.right) == 1, f"{mutation.file}: {mutation.right!r}"
