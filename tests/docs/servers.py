"""The servers that pages talk to: what a page says in a `server` block, or one of the tests' own."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fixtures.processes import Process


@contextmanager
def development_server(adopt: Callable[[Process], None]) -> Iterator[dict[str, str]]:
    """`fencepost dev`, on free ports and with a database of its own. Gives what it has in place of what pages say."""
    # Not below pytest's own folder, which is private: PostgreSQL runs as another user when this is root.
    folder = Path(tempfile.mkdtemp(prefix="fencepost-docs-"))
    folder.chmod(0o711)
    data, log = folder / "data", folder / "dev.log"
    command = [sys.executable, "-m", "fencepost_server.cli", "dev", "--data-dir", str(data), "--log-format", "json"]
    process = Process([*command, "--grpc-port", "0", "--http-port", "0"], log)
    adopt(process)
    process.start()
    try:
        serving, database = process.wait_event("serving"), process.wait_event("database")
        address = f"127.0.0.1:{serving['grpc_port']}"
        yield {
            "127.0.0.1:7654": address,
            "127.0.0.1:7655": f"127.0.0.1:{serving['http_port']}",
            "FENCEPOST_ADDRESS": address,
            "FENCEPOST_DSN": database["dsn"],
        }
        assert process.terminate() == 0, process.logs
    finally:
        if process.running:
            process.kill()
        shutil.rmtree(folder)
