from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gateway.disk import RESERVE_BYTES, free_bytes, has_room, reserve_bytes, written_paths
from gateway.settings import Settings


def test_missing_path_has_the_free_space_of_its_parent(tmp_path: Path) -> None:
    found = free_bytes(tmp_path / "not" / "there")

    assert found == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


def test_file_that_would_use_the_reserve_does_not_fit(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)

    assert has_room(tmp_path, 0, size_bytes=free // 2)
    assert not has_room(tmp_path, free // 4 * 3, size_bytes=free // 2)
    assert not has_room(tmp_path, 2**60)


def test_default_reserve_is_at_most_a_twentieth_of_the_disk(tmp_path: Path) -> None:
    total = shutil.disk_usage(tmp_path).total

    assert reserve_bytes(tmp_path, None) == min(RESERVE_BYTES, total // 20)
    assert reserve_bytes(tmp_path, 7) == 7


def test_only_local_disks_are_watched(tmp_path: Path) -> None:
    local = Settings(
        home=tmp_path / "home",
        database_url=f"sqlite:///{tmp_path}/sql/db",
        blob_url=f"file://{tmp_path}/a%20place",
    )
    remote = Settings(home=tmp_path, database_url="postgresql://db/x", blob_url="s3://bucket")

    assert written_paths(local) == (tmp_path / "home", tmp_path / "sql", tmp_path / "a place")
    assert written_paths(remote) == (tmp_path,)
