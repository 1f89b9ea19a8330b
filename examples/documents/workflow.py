"""The workflow: list the pages, read each of them in a step of its own, check all links, report.

Listing is a local step: short, in the workflow's worker. Reading is a remote step: any worker may take it, so this
scales over machines, and one that dies costs its pages another attempt.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from examples.documents.pages import Page, read_page
from fencepost import PermanentError, Retry, StepFailed, WorkflowContext, step, workflow


@dataclass(frozen=True)
class Folder:
    """What to read: ``*.md`` in a folder that workers can see, so many pages at a time."""

    path: str
    at_a_time: int = 4


@dataclass(frozen=True)
class Report:
    """All pages together."""

    pages: int
    words: int
    blocks: int
    longest: str
    broken_links: list[str]
    unreadable: list[str]


@workflow("documents", compatibility_id="1")
async def documents(ctx: WorkflowContext, folder: Folder) -> Report:
    """Read every page of a folder and check the links between them."""
    names = await ctx.run(list_pages, folder.path)
    room = asyncio.Semaphore(folder.at_a_time)
    done = 0
    ctx.on_query("progress", lambda: f"{done} of {len(names)} pages")

    async def read(name: str) -> Page | None:
        nonlocal done
        async with room:
            try:
                return await ctx.call(read_one, f"{folder.path}/{name}", retry=Retry(max_attempts=3), timeout=30)
            except StepFailed as failed:
                ctx.logger.warning("%s: %s", name, failed)
                return None
            finally:
                done += 1

    found = await asyncio.gather(*(read(name) for name in names))
    return report([page for page in found if page], [name for name, page in zip(names, found, strict=True) if not page])


def report(pages: list[Page], unreadable: list[str]) -> Report:
    """Join what was found. It is computed again at each replay, so it must be as pure as it is."""
    anchors = {page.name: page.anchors for page in pages}
    broken = []
    for page in pages:
        for link in page.links:
            name, _, place = link.partition("#")
            known = anchors.get(name or page.name)
            if known is None or (place and place not in known):
                broken.append(f"{page.name}: {link}")
    return Report(
        pages=len(pages),
        words=sum(page.words for page in pages),
        blocks=sum(page.blocks for page in pages),
        longest=max(pages, key=lambda page: page.words).name if pages else "",
        broken_links=broken,
        unreadable=unreadable,
    )


def list_pages(folder: str) -> list[str]:
    """The names of the pages, sorted: the order of a directory is that of no two machines."""
    if not Path(folder).is_dir():
        raise PermanentError(f"{folder} is no folder here", code="NO_FOLDER")
    return sorted(path.name for path in Path(folder).glob("*.md"))


@step("documents.read")
def read_one(path: str) -> Page:
    """Read one page, wherever this worker is."""
    try:
        return read_page(Path(path))
    except UnicodeDecodeError as error:
        raise PermanentError(f"{path} is no text", code="NO_TEXT") from error


STEPS = (read_one,)
