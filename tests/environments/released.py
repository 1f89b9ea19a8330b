"""Earlier states of this repository, run as the releases before this one: their servers, and workers with their SDK.

They come out of git's history, and run with this environment's libraries.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fixtures.ports import stable_port
from tests.fixtures.processes import ROOT, Process

FIRST_ENGINE = "812f2db171e152fdc9c4489e81f16f9ed88db99d"
"""Sequences of remote steps; schema 2."""
CODE_WORKFLOWS = "570830643328cd188b83accf9508439b9d0f66a7"
"""All that there is since; schema 6."""
_TIMEOUT = 60


@dataclass(frozen=True, slots=True)
class Release:
    """One of them, unpacked into a folder."""

    folder: Path
    _start: Callable[..., Process]

    @property
    def path(self) -> str:
        """PYTHONPATH with which its packages are found before this one's."""
        return f"{self.folder / 'server'}:{self.folder / 'worker_sdk' / 'python'}"

    def run(self, *arguments: str, **variables: str) -> Process:
        """Start a program with its packages."""
        return self._start(*arguments, PYTHONPATH=self.path, **variables)

    def migrate(self, dsn: str) -> None:
        """Make its schema."""
        process = self.run("-m", "fencepost_server.cli", "migrate", FENCEPOST_DSN=dsn)
        assert process.wait() == 0, process.logs

    def serve(self, dsn: str, **settings: str) -> tuple[Process, str]:
        """Start its server, and wait until it serves: the process, and the address of gRPC."""
        port = stable_port()
        ports = {"FENCEPOST_GRPC_PORT": str(port), "FENCEPOST_HTTP_PORT": str(stable_port())}
        given = {f"FENCEPOST_{name.upper()}": value for name, value in settings.items()}
        server = self.run(
            "-m", "fencepost_server.cli", "serve", FENCEPOST_DSN=dsn, FENCEPOST_LOG_FORMAT="json", **ports, **given
        )
        server.wait_event("serving")
        return server, f"127.0.0.1:{port}"


@pytest.fixture(scope="session")
def unpacked(session_folder: Path) -> Callable[[str], Path]:
    """Unpacks a commit, once. Skips the test if git does not have it."""

    def unpack(commit: str) -> Path:
        folder = session_folder / f"release-{commit}"
        if not folder.exists():
            command = ["git", "archive", commit, "server", "worker_sdk/python"]
            archive = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=_TIMEOUT, check=False)
            if archive.returncode:
                pytest.skip(f"the release before is not in this copy's history: {archive.stderr.decode().strip()}")
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
                # Python 3.11 has filters from its fourth release on.
                tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
                tar.extractall(folder)
        return folder

    return unpack


@pytest.fixture
def released(unpacked: Callable[[str], Path], python_process: Callable[..., Process]) -> Callable[[str], Release]:
    """An earlier release, by its commit."""
    return lambda commit: Release(unpacked(commit), python_process)
