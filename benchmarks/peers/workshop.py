"""Where the peers are set up and run: a folder with an environment of Python packages and one of Node packages.

Nothing of it is installed anywhere else. Packages come from where pip and npm are configured to get them; versions are
pinned in requirements.txt and jobs/package.json. What is there already is used again.
"""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Child, ProcessFailed

HERE = Path(__file__).resolve().parent
JOBS = HERE / "jobs"
SETUP_TIMEOUT = 900.0
JOB_TIMEOUT = 300.0
_COMPLETE = "complete"


class Workshop:
    """One folder, and the processes that run in it. ``folder`` is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._python = self.folder / "venv"
        self._node = self.folder / "node"

    async def set_up_python(self) -> None:
        """Install the Python packages. Raises ProcessFailed."""
        mark = self._python / _COMPLETE
        wanted = (HERE / "requirements.txt").read_text(encoding="utf-8")
        if _is(mark, wanted):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        await self._run("venv", [sys.executable, "-m", "venv", "--clear", "--without-pip", str(self._python)])
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(self._python)]
        await self._run("pip", [*pip, "install", "--requirement", str(HERE / "requirements.txt")])
        mark.write_text(wanted, encoding="utf-8")

    async def set_up_node(self) -> None:
        """Install the Node packages, with the jobs beside them, where Node looks for them. Raises ProcessFailed."""
        mark = self._node / _COMPLETE
        wanted = (JOBS / "package.json").read_text(encoding="utf-8")
        self._node.mkdir(parents=True, exist_ok=True)
        for job in (*JOBS.glob("*.mjs"), JOBS / "package.json"):
            shutil.copy(job, self._node)
        if not _is(mark, wanted):
            await self._run("npm", [program("npm"), "install", "--silent", "--no-audit", "--no-fund"], cwd=self._node)
            mark.write_text(wanted, encoding="utf-8")

    async def _run(self, name: str, command: Sequence[str], cwd: Path | None = None) -> None:
        child = await Child.start(name, command, {}, self.folder, cwd=cwd or self.folder)
        try:
            await child.finished(SETUP_TIMEOUT)
        finally:
            await child.end()

    async def python_job(self, job: str, *arguments: str | int) -> dict[str, Any]:
        """Run a job of jobs/ and return its result. Raises ProcessFailed."""
        program = str(self._python / "bin" / "python")
        return await self._job(job, [program, "-W", "ignore", str(JOBS / f"{job}.py")], arguments, self.folder)

    async def node_job(self, job: str, *arguments: str | int) -> dict[str, Any]:
        """The same for one in JavaScript."""
        return await self._job(job, [program("node"), f"{job}.mjs"], arguments, self._node)

    async def _job(self, job: str, command: list[str], arguments: Sequence[str | int], cwd: Path) -> dict[str, Any]:
        child = await Child.start(job, [*command, *map(str, arguments)], {}, self.folder, cwd=cwd)
        try:
            return await child.event("result", JOB_TIMEOUT)
        finally:
            await child.end()

    async def temporal_server(self, port: int) -> Child:
        """Temporal's development server, which keeps all in memory."""
        words = ["server", "start-dev", "--headless", "--log-level", "error", "--ip", "127.0.0.1", "--port", str(port)]
        words += ["--http-port", str(free_port()), "--metrics-port", str(free_port())]
        return await Child.start("temporal", [str(self._python / "bin" / "temporal"), *words], {}, self.folder)

    async def restate_server(self, admin_port: int, ingress_port: int, data: Path) -> Child:
        """Restate's server with its own log in ``data``. Raises ProcessFailed if no program of it fits this machine."""
        programs = sorted(self._node.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"))
        if not programs:
            raise ProcessFailed("npm has installed no server of Restate for this machine")
        variables = {
            "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin_port}",
            "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress_port}",
            "RESTATE_BIND_ADDRESS": f"127.0.0.1:{free_port()}",
            "RESTATE_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
        }
        command = [str(programs[0]), "--base-dir", str(data)]
        return await Child.start("restate", command, variables, self.folder)

    async def restate_service(self, port: int) -> Child:
        """The process that runs the steps of Restate's job."""
        child = await Child.start(
            "restate-service", [program("node"), "restate_service.mjs", str(port)], {}, self.folder, cwd=self._node
        )
        try:
            await child.event("serving")
        except BaseException:
            await child.end()
            raise
        return child


def program(name: str) -> str:
    """The path of a program. Raises ProcessFailed if it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise ProcessFailed(f"{name} is not installed")
    return path


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _is(mark: Path, wanted: str) -> bool:
    return mark.is_file() and mark.read_text(encoding="utf-8") == wanted
