"""Runs ``tollgate`` commands in forks of one process that has imported them all.

Starting Python and importing takes longer than most commands. ``python -m
tests.docs.command_server SOCKET`` serves; ``install`` writes the ``tollgate`` that calls it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Final

from gateway.__main__ import COMMANDS, main

_CLIENT: Final = """\
#!{python} -ISE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    sent = {{"cwd": os.getcwd(), "environment": dict(os.environ), "arguments": sys.argv[1:]}}
    socket.send_fds(server, [json.dumps(sent).encode()], [0, 1, 2])
    sys.exit(int(server.recv(8) or 1))
"""


def install(directory: Path, address: Path) -> None:
    """Write a ``tollgate`` to a directory for ``PATH``."""
    directory.mkdir()
    script = directory / "tollgate"
    script.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
    script.chmod(0o755)


def serve(address: str) -> None:
    for place in COMMANDS.values():
        importlib.import_module(f"gateway.commands.{place.partition(':')[0]}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    _answer(client)


def _answer(client: socket.socket) -> None:
    """Run the command of a client in this fork, and tell the client its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sent = json.loads(text)
    os.chdir(sent["cwd"])
    os.environ.clear()
    os.environ.update(sent["environment"])
    sys.argv = ["tollgate", *sent["arguments"]]
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    client.send(str(status).encode())
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
