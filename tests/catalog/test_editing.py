"""Changing the catalog file: what a text would change for customers, and saving it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.audit_log import Author
from gateway.catalog import store
from gateway.catalog.editing.draft import Draft, compare_lines, examine, example_text
from gateway.catalog.editing.files import (
    KEPT_MAX,
    FileChanged,
    NotWritable,
    kept_texts,
    read_kept,
    save_file,
)
from gateway.catalog.loader import check_content, read_catalog
from gateway.catalog.reloads import digest_of
from gateway.catalog.store import LiveCatalog
from gateway.catalog.tasks import TASKS
from gateway.sql.database import Database
from gateway.tables.audit import audit_events

OLD = """\
models:
  - name: chat
    task: text-generation
    engine: echo
    limits: {context_tokens: 4096, output_tokens: 512, choices: 4}
    price:
      - {unit: input_token, amount: "1", per: 1000000}
      - {unit: output_token, amount: "2", per: 1000000}
    aliases: [old-chat]
  - name: painter
    task: text-to-image
    engine: echo
    sizes: [512x512, 1024x1024]
    price: [{unit: image, amount: "0.02"}]
  - name: poster
    task: text-to-image
    workflow:
      inputs: {idea: {type: text}, tone: {type: text, optional: true}}
      steps: [{name: draw, model: painter, input: {prompt: "${inputs.idea}"}}]
      output: ${steps.draw}
    price: steps
"""
TESTER = Author("ann", "cli")
Connect = Callable[[str], Database]


def drafted(text: str, *, old: str = OLD) -> Draft:
    path = Path("catalog.yaml")
    return examine(text.encode(), path, read_catalog(old.encode(), path).models)


def changes(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    draft = drafted(text)
    assert draft.can_be_loaded, draft.problems
    return {(one.model, one.field): (one.effect, one.sentence) for one in draft.changes}


def test_same_text_changes_nothing() -> None:
    assert drafted(OLD).changes == []
    assert drafted(OLD + "# a comment\n").changes == []


def test_dearer_model_is_worse_also_for_the_workflow_that_uses_it() -> None:
    found = changes(OLD.replace('"0.02"', '"0.03"'))

    assert found["painter", "price"][0] == "worse"
    assert "$0.02 per image becomes $0.03 per image" in found["painter", "price"][1]
    assert "(+50.0 %)" in found["painter", "price"][1]
    assert found["poster", "price"][0] == "worse"
    assert found.keys() == {("painter", "price"), ("poster", "price")}


def test_price_that_an_operator_set_is_what_a_new_one_replaces() -> None:
    path = Path("catalog.yaml")
    old = read_catalog(OLD.encode(), path).models
    dearer = read_catalog(OLD.replace('"0.02"', '"0.05"').encode(), path).models
    in_force = {entry.name: entry for entry in dearer}

    text = OLD.replace('"0.02"', '"0.03"').encode()
    found = examine(text, path, old, in_force=in_force.get).changes

    painter = next(one for one in found if one.model == "painter")
    assert painter.effect == "better"
    assert "$0.05 per image becomes $0.03 per image" in painter.sentence


def test_models_limits_and_choices_that_go_are_worse() -> None:
    text = OLD.replace("output_tokens: 512", "output_tokens: 256").replace("512x512, ", "")
    found = changes(text.replace("aliases: [old-chat]", "aliases: []"))

    assert found["chat", "limits.output_tokens"] == ("worse", "It is 256, not 512.")
    assert found["painter", "sizes"] == ("worse", "No longer accepted as size: 512x512.")
    assert found["chat", "aliases"][0] == "worse"
    assert changes(OLD.replace("choices: 4", "choices: 8"))["chat", "limits.choices"][0] == "better"


def test_renamed_model_is_gone_unless_its_name_stays_as_an_alias() -> None:
    renamed = OLD.replace("- name: chat", "- name: talk")
    assert changes(renamed)["chat", "model"][0] == "worse"
    assert changes(renamed)["talk", "model"][0] == "better"

    kept = renamed.replace("[old-chat]", "[old-chat, chat]")
    assert changes(kept)["chat", "model"] == (
        "other", "No longer on sale; talk serves requests for it, at its own price."
    )  # fmt: skip


def test_workflow_whose_inputs_go_or_become_required_is_broken() -> None:
    required = changes(OLD.replace("tone: {type: text, optional: true}", "tone: {type: text}"))
    gone = changes(OLD.replace(", tone: {type: text, optional: true}", ""))

    assert required["poster", "workflow.inputs.tone"][0] == "worse"
    assert "requests with it are refused" in gone["poster", "workflow.inputs.tone"][1]
    broken = drafted(OLD.replace("- name: painter", "- name: brush"))
    assert not broken.can_be_loaded
    assert any("painter" in one.message for one in broken.problems)


def test_mistake_has_its_line_column_and_path() -> None:
    draft = drafted(OLD.replace('"0.02"', "0.02"))

    (problem,) = draft.problems
    assert not draft.can_be_loaded
    assert (problem.line, problem.path) == (14, "models[1].price[0].amount")
    assert OLD.splitlines()[problem.line - 1][problem.column - 1 :].startswith("amount")


def test_lines_that_differ_have_both_numbers() -> None:
    found = compare_lines("a\nb\nc\nd\ne\n", "a\nb\nx\nd\ne\n")

    assert [(one.kind, one.old, one.new, one.text) for one in found if one.kind != "same"] == [
        ("removed", 3, None, "c"),
        ("added", None, 3, "x"),
    ]


def test_every_task_has_an_example_that_is_valid() -> None:
    shown = re.sub(r"(?m)^(  )?# ?(?=- name:|  |gpu_hours:|aliases:)", r"\1", example_text())
    catalog, problems = check_content(shown.encode(), Path("example.yaml"))

    assert problems == ()
    assert catalog is not None
    assert {task for entry in catalog.models for task in (entry.task, *entry.also)} == set(TASKS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "catalog.yaml"
    made.write_text(OLD)
    return made


def test_saved_file_keeps_its_permissions_and_the_last_texts(path: Path, tmp_path: Path) -> None:
    path.chmod(0o640)
    kept = tmp_path / "kept"

    for number in range(KEPT_MAX + 2):
        before = digest_of(path.read_bytes())
        save_file(path, f"# {number}\n".encode(), before, kept=kept)

    assert path.read_text() == f"# {KEPT_MAX + 1}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(kept_texts(kept)) == KEPT_MAX
    assert read_kept(kept, kept_texts(kept)[0].name) == f"# {KEPT_MAX}\n".encode()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["catalog.yaml", "kept"]
    with pytest.raises(LookupError):
        read_kept(kept, "../catalog.yaml")


def test_file_that_was_changed_meanwhile_is_not_replaced(path: Path, tmp_path: Path) -> None:
    opened = digest_of(path.read_bytes())
    path.write_text("# theirs\n")

    with pytest.raises(FileChanged) as refused:
        save_file(path, b"# ours\n", opened, kept=tmp_path / "kept")

    assert refused.value.content == b"# theirs\n"
    assert path.read_text() == "# theirs\n"
    assert not (tmp_path / "kept").exists()


def test_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(path)

    save_file(link, b"# new\n", digest_of(OLD.encode()), kept=tmp_path / "kept")

    assert link.is_symlink()
    assert path.read_text() == "# new\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_file_in_a_directory_of_others_is_not_writable(path: Path, tmp_path: Path) -> None:
    path.parent.chmod(0o500)
    try:
        with pytest.raises(NotWritable, match="directory"):
            save_file(path, b"", digest_of(OLD.encode()), kept=tmp_path / "kept")
    finally:
        path.parent.chmod(0o700)


async def test_save_is_in_force_here_and_in_every_gateway_that_shares_the_file(
    path: Path, tmp_path: Path, database_url: str, connect: Connect, short_notice: float
) -> None:
    text = OLD.encode()
    elsewhere = tmp_path / "copy.yaml"
    elsewhere.write_bytes(text)
    database = connect(database_url)
    live = await LiveCatalog.open(path, database)
    others = [await LiveCatalog.open(each, connect(database_url)) for each in (path, elsewhere)]
    new = OLD.replace("output_tokens: 512", "output_tokens: 256").encode()

    async with asyncio.TaskGroup() as tasks:
        fresh = [tasks.create_task(each.keep_fresh()) for each in (live, *others)]
        kept = tmp_path / "kept"
        assert await live.save(new, digest_of(text), TESTER, kept=kept) == ()
        await until(lambda: others[0].content == new)
        # A copy follows when it has the same text.
        assert others[1].content == text
        elsewhere.write_bytes(new)
        await until(lambda: others[1].content == new)
        for each in fresh:
            each.cancel()

    for each in (live, *others):
        entry = each.find("chat")
        assert entry is not None
        assert entry.limits.output_tokens == 256
    with database.transaction() as connection:
        (event,) = connection.execute(
            select(audit_events).where(audit_events.c.act == "catalog.save")
        ).all()
    assert event.actor == "ann"
    assert event.before == {"sha256": digest_of(text)}
    assert event.after["sha256"] == digest_of(new)


async def test_mistake_changes_neither_the_file_nor_what_is_sold(
    path: Path, tmp_path: Path, database_url: str, connect: Connect
) -> None:
    live = await LiveCatalog.open(path, connect(database_url))

    problems = await live.save(b"models: []\n", digest_of(OLD.encode()), TESTER, kept=tmp_path)

    assert problems
    assert text_of(path) == OLD
    assert live.names() == ("chat", "painter", "poster")


async def test_save_that_is_not_booked_leaves_the_old_file(
    path: Path, tmp_path: Path, database_url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await LiveCatalog.open(path, connect(database_url))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the database went away")

    monkeypatch.setattr(store, "record", fail)
    with contextlib.suppress(RuntimeError):
        await live.save(OLD.encode() + b"#\n", digest_of(OLD.encode()), TESTER, kept=tmp_path)

    assert text_of(path) == OLD


def text_of(path: Path) -> str:
    return path.read_text()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not become so within 30 s")
