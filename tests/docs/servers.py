"""The servers that pages talk to: what a page says in a `server` block, or one of the harness's."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures.processes import Process


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is: host:port of gRPC and of HTTP, and the connection string of its database."""

    grpc: str
    http: str
    dsn: str

    def said(self) -> dict[str, str]:
        """What pages say of a server, and what it is here."""
        return {"127.0.0.1:7654": self.grpc, "127.0.0.1:7655": self.http}

    def variables(self) -> dict[str, str]:
        """What a reader has set in the terminal."""
        return {"FENCEPOST_ADDRESS": self.grpc, "FENCEPOST_DSN": self.dsn}


@contextmanager
def development_server(adopt: Callable[[Process], None]) -> Iterator[Place]:
    """`fencepost dev`, on free ports and with a database of its own."""
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
        ports = (serving["grpc_port"], serving["http_port"])
        yield Place(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", database["dsn"])
        assert process.terminate() == 0, process.logs
    finally:
        if process.running:
            process.kill()
        shutil.rmtree(folder)
