"""docs/cli.md says what is there, and its examples work."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shlex
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from fencepost_server.cli.program import make_program
from fencepost_server.config import Config
from tests.cli.program import PROGRAM, Program
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"<!-- settings -->\n(.*?)<!-- end of settings -->", re.DOTALL)


def settings_table() -> str:
    rows = ["| flag | default | |", "|---|---|---|"]
    for field in dataclasses.fields(Config):
        default = ("yes" if field.default else "no") if isinstance(field.default, bool) else str(field.default)
        doc = field.metadata["doc"].replace("|", "\\|")
        rows.append(f"| `--{field.name.replace('_', '-')}` | {default} | {doc} |")
    return "\n".join(rows) + "\n"


def flags() -> Iterator[tuple[str, str]]:
    """Every command and flag but the settings of servers."""
    settings = {f"--{prefix}{f.name.replace('_', '-')}" for f in dataclasses.fields(Config) for prefix in ("", "no-")}
    for name, command in make_program().commands.items():
        for word, inner in getattr(command, "commands", {"": command}).items():
            for parameter in inner.params:
                for option in parameter.opts:
                    if option.startswith("--") and option not in settings - {"--dsn"}:
                        yield f"{name} {word}".strip(), option


def test_the_page_has_every_command_and_flag() -> None:
    text = PAGE.read_text("utf-8")
    missing = {(command, flag) for command, flag in flags() if f"`{flag}" not in text and f" {flag}" not in text}
    commands = {command for command, _ in flags()}
    assert len(commands) == 34
    assert missing == set()
    assert [command for command in commands if f"`{command.split()[-1]}" not in text] == []


def test_the_page_has_every_setting_as_it_is() -> None:
    found = TABLE.search(PAGE.read_text("utf-8"))
    assert found is not None
    assert found[1] == settings_table(), "put this table into docs/cli.md:\n" + settings_table()


async def answer(worker: RawWorker) -> None:
    while True:
        await worker.complete(await worker.task(timeout=600), '"Hello"')


async def test_the_examples_of_the_page_work(
    fencepost: Program,
    server: InProcessServer,
    connect_worker: Callable[..., Awaitable[RawWorker]],
    tmp_path: Path,
) -> None:
    blocks = FENCED.findall(PAGE.read_text("utf-8"))
    files = {"yaml": "greeting.yaml", "jsonl": "orders.jsonl"}
    for kind, content in blocks:
        if kind in files:
            (tmp_path / files[kind]).write_text(content)
    (tmp_path / "input.json").write_text('"Emmy"')
    commands = [
        line.removeprefix("$ ") for kind, content in blocks if kind == "console" for line in content.splitlines()
    ]
    assert len(commands) > 10
    worker = await connect_worker(server.grpc_address, handlers=["demo.greet"])
    answering = asyncio.create_task(answer(worker))
    run_id = ""
    for command in commands:
        program, *arguments = shlex.split(command.replace("RUN", run_id))
        assert program == PROGRAM.name
        arguments = [str(tmp_path / word) if (tmp_path / word).is_file() else word for word in arguments]
        result = await fencepost(*arguments)
        assert (result.code, result.err) == (0, ""), command
        if found := re.match(r"run +(\S+)$", result.out, re.MULTILINE):
            run_id = found[1]
    answering.cancel()
