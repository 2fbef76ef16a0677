"""The planner's page equals the command, and says what is wrong where it was entered."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from typing import Any
from urllib.parse import urlencode

import pytest

from gateway.console.views.formats import DASH
from tests.cli.here import run_here
from tests.console.visiting import Installation

ASKED = {
    "llama-3.3-70b": {"gpu": "H200, L40S", "dtype": "fp8", "batch": "16", "hour": "3.20"},
    "sdxl": {"gpu": "H200,L40S", "hour": "1.1", "steps": "30", "per_day": "100000"},
    "ours": {"gpu": "H100", "params": "7B", "layers": "32", "kv_heads": "8", "head_dim": "128",
             "hour": "2"},
}  # fmt: skip


def cells(page: str, table: str) -> list[list[str]]:
    """Return the texts of a table's rows, by its id."""
    body = page.partition(f'id="{table}"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [
        [
            " ".join(unescape(re.sub(r"<[^>]+>", " ", cell)).split())
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
        ]
        for row in body.split("</tr>")[:-1]
    ]


def printed(page: str, installation: Installation) -> Any:
    """Run the command that a page prints, with --json."""
    found = re.search(r"<code>(tollgate plan [^<]+)</code>", page)
    assert found is not None
    words = shlex.split(unescape(found[1]))[1:]
    environment = {
        "TOLLGATE_CATALOG": str(installation.settings.catalog),
        "DATABASE_URL": installation.settings.sql_url,
    }
    done = run_here((*words, "--json"), environment)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("model", ASKED)
def test_page_has_the_figures_of_the_command(installation: Installation, model: str) -> None:
    browser = installation.visitor("finance")
    page = browser.get(f"/console/plan?{urlencode({'model': model, **ASKED[model]})}").text

    view = printed(page, installation)

    assert view["model"] == model
    assert [row[0] for row in cells(page, "memory")] == [one["name"] for one in view["devices"]]
    results = [
        [one["name"], one["result"]["basis"], f"{one['result']['device_seconds']:.4g}",
         f"{one['result']['results_per_second']:.4g}", one["result"]["cost_usd"] or DASH]
        for one in view["devices"] if one["result"]
    ]  # fmt: skip
    assert [row[:5] for row in cells(page, "results")] == results
    if view["shape"] is not None:
        million = [
            [one["name"], kind, cost["roofline"], cost["expected"]]
            for one in view["devices"]
            for kind in ("output", "input")
            if (cost := one["text"][f"usd_per_million_{kind}_tokens"])
        ]
        assert [row[:4] for row in cells(page, "million")] == million
    for assumption in view["assumptions"]:
        assert assumption in unescape(page)


def test_curve_has_the_cost_of_the_plan_at_its_batch(installation: Installation) -> None:
    browser = installation.visitor("operator")
    asked = {"model": "llama-3.3-70b", **ASKED["llama-3.3-70b"], "gpu": "H200"}
    page = browser.get(f"/console/plan?{urlencode(asked)}").text

    figure = page.partition("<figure")[2].partition("</figure>")[0]
    curve = dict(re.findall(r'data-x="(\d+)">.*?<td class="number">([^<]+)</td>', figure))
    million = {row[1]: row[3] for row in cells(page, "million")}
    assert curve["16"] == million["output"]
    assert float(curve["1"]) > float(curve["8"]) > float(curve["16"])


def test_entry_of_the_catalog_shows_its_price(installation: Installation) -> None:
    text = installation.settings.catalog.read_text()
    assert "\n  - name: echo" in text
    browser = installation.visitor("operator")

    refused = browser.get("/console/plan?model=echo&gpu=H200")

    assert refused.status_code == 404
    assert "unknown size" in unescape(refused.text)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("model=nothing", "is not in the catalog"),
        ("model=sdxl&gpu=H9000", "Unknown GPU"),
        ("model=sdxl&steps=many", "is not a number"),
        ("model=sdxl&batch=1.5", "is not a whole number"),
        ("model=sdxl&efficiency=2", "at most 1"),
        ("model=ours&params=70B", "layers"),
        ("model=sdxl&memory=80", "bandwidth"),
    ],
)
def test_what_cannot_be_planned_is_said(installation: Installation, query: str, said: str) -> None:
    answer = installation.visitor("operator").get(f"/console/plan?{query}")

    assert answer.status_code in (400, 404)
    assert said in unescape(answer.text)


def test_planner_is_for_the_installation(installation: Installation) -> None:
    assert installation.visitor("owner").get("/console/plan").status_code == 404
    assert "For example" in installation.visitor("auditor").get("/console/plan").text
