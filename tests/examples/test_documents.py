"""The documents example over the repository's own pages, and over some that can't be read."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.documents import workflow as example
from examples.documents.pages import Page, read_page
from examples.documents.workflow import STEPS, Folder, Report, documents
from fencepost import RunFailed, step
from fencepost.testing import AsyncEnvironment
from tests.docs.pages import ROOT, blocks
from tests.fixtures.processes import Process
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually

DOCS = ROOT / "docs"


@pytest.mark.parametrize("always_replay", [False, True])
async def test_its_report_of_the_docs_is_what_reading_them_at_once_comes_to(
    env: AsyncEnvironment, tmp_path: Path, always_replay: bool
) -> None:
    docs = shutil.copytree(DOCS, tmp_path / "docs")  # somebody may be writing
    async with env.worker(STEPS, workflows=[documents], always_replay=always_replay):
        found = await env.run(documents, Folder(str(docs)), type=Report)
    assert found == example.report([read_page(path) for path in sorted(docs.glob("*.md"))], [])
    assert (found.pages, found.unreadable) == (len(list(docs.iterdir())), [])


def test_it_finds_as_many_blocks_of_code_as_the_tests_of_the_docs_do() -> None:
    for path in DOCS.glob("*.md"):
        assert read_page(path).blocks == len(blocks(f"docs/{path.name}")), path.name


def test_no_link_between_the_docs_leads_nowhere() -> None:
    assert example.report([read_page(path) for path in sorted(DOCS.glob("*.md"))], []).broken_links == []


async def test_no_more_pages_are_read_at_a_time_than_was_said(env: AsyncEnvironment, tmp_path: Path) -> None:
    under_way, most = 0, 0
    full = asyncio.Event()

    @step("documents.read")
    async def read(path: str) -> Page:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 3:
            full.set()
        await full.wait()  # the first ones, for as long as it takes until they are three
        await asyncio.sleep(0.01)
        under_way -= 1
        return Page(Path(path).name, 1, 0, [], [])

    for number in range(20):
        (tmp_path / f"{number:02}.md").touch()
    async with env.worker([read], workflows=[documents], slots=20):
        found = await env.run(documents, Folder(str(tmp_path), at_a_time=3), type=Report)
    assert (found.pages, most) == (20, 3)


async def test_pages_that_can_not_be_read_and_links_to_nothing_are_told(env: AsyncEnvironment, tmp_path: Path) -> None:
    (tmp_path / "good.md").write_text("# Good one\n[a](#good-one) [b](#bad) [c](other.md) [d](gone.md)\n")
    (tmp_path / "other.md").write_text("# Other\n```text\n# no heading, and no [link](gone.md)\n```\n")
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "vanished.md").symlink_to(tmp_path / "nowhere")
    async with env.worker(STEPS, workflows=[documents]):
        found = await env.run(documents, Folder(str(tmp_path)), type=Report)
    assert (found.pages, found.blocks) == (2, 1)
    assert found.unreadable == ["binary.md", "vanished.md"]
    assert found.broken_links == ["good.md: #bad", "good.md: gone.md"]


async def test_a_folder_that_is_not_there_fails_the_run_at_once(env: AsyncEnvironment, tmp_path: Path) -> None:
    async with env.worker(STEPS, workflows=[documents]):
        with pytest.raises(RunFailed) as failed:
            await env.run(documents, Folder(str(tmp_path / "none")))
    assert failed.value.failure.code == "NO_FOLDER"


async def test_its_command_prints_the_report(server: InProcessServer, python_process: Callable[..., Process]) -> None:
    program = python_process("-m", "examples.documents", "--address", server.grpc_address)
    await eventually(lambda: not program.running, 120)
    assert program.returncode == 0, program.logs
    assert f"{len(list(DOCS.glob('*.md')))} pages, " in program.logs
