"""The tables of the documentation say what the code says: settings, error codes, metrics, terms."""

from __future__ import annotations

import inspect
import re

import psycopg
import pytest

from fencepost import AsyncClient, Client, StepContext, Worker, WorkflowContext, workflow
from fencepost.deterministic import refused
from fencepost_server.config import ENV_PREFIX
from fencepost_server.domain import errors
from fencepost_server.telemetry import EngineCollector
from fencepost_server.wire.status import code_of
from scripts.docs import PAGE, with_table
from tests.docs.pages import ROOT
from tests.fixtures.servers import InProcessServer


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the rows of a page's tables whose first cell is a name in code that matches ``first``."""
    text = (ROOT / page).read_text("utf-8")
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(f"`{first}`", cells[0]):
            found.append([cells[0].strip("`"), *cells[1:]])
    return found


def classes() -> dict[str, type[errors.FencepostError]]:
    """The error classes by their reason."""
    found, waiting = {}, [errors.FencepostError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if not kind.__subclasses__():
            found[kind.reason] = kind
    return found


def test_every_error_is_listed_with_the_code_that_it_is_sent_with() -> None:
    codes = {reason: code_of(kind("")).name for reason, kind in classes().items()}
    assert {row[0]: row[1] for row in rows("docs/errors.md", "[A-Z_]+")} == codes


def test_every_error_says_what_it_means_and_what_to_do() -> None:
    incomplete = [row[0] for row in rows("docs/errors.md", "[A-Z_]+") if len(row) != 5 or not row[2] or not row[4]]
    assert incomplete == []


def test_the_table_of_settings_is_that_of_the_server() -> None:
    page = PAGE.read_text("utf-8")
    assert page == with_table(page), "write it anew: .venv/bin/python scripts/docs.py"
    assert f"`{ENV_PREFIX}" in page, "the page says how a setting is given"


async def test_every_metric_is_listed_with_what_it_says(server: InProcessServer) -> None:
    found = {metric.name: metric.documentation for metric in EngineCollector(server.app.engine).collect()}
    assert {row[0]: row[-1] for row in rows("docs/operations.md", "fencepost_[a-z_]+")} == found


def words(page: str, column: int) -> set[str]:
    """The words in code of a column of the glossary, 0 being the first."""
    found: set[str] = set()
    for line in (ROOT / page).read_text("utf-8").splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) > column:
            found.update(re.findall(r"`([^`]+)`", cells[column]))
    return found


def sources(folder: str, pattern: str) -> str:
    """All text of the files of a folder that match."""
    return "\n".join(path.read_text("utf-8") for path in sorted((ROOT / folder).rglob(pattern)))


@pytest.mark.parametrize(
    ("column", "folder", "pattern"),
    [
        (1, "proto", "*.proto"),
        (2, "worker_sdk/python/fencepost", "*.py"),
        (3, "server/fencepost_server/store/migrations", "*.sql"),
    ],
)
def test_every_name_in_the_glossary_exists_where_it_says(column: int, folder: str, pattern: str) -> None:
    known = set(re.findall(r"\w+", sources(folder, pattern)))
    names = words("docs/glossary.md", column)
    assert len(names) > 10
    assert [name for name in sorted(names) if not set(re.findall(r"\w+", name)) <= known] == []


def test_every_file_named_on_the_page_on_architecture_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    places = [ROOT, ROOT / "server/fencepost_server", ROOT / "worker_sdk/python/fencepost"]
    named = set(re.findall(r"`([\w./]+(?:\.py|\.sql|\.toml|/))`", page))
    assert len(named) > 30
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


async def test_every_loop_and_every_table_is_on_the_page_on_architecture(server: InProcessServer, dsn: str) -> None:
    loops = {loop.name for loop in server.app.engine.loops}
    listed = {row[0] for row in rows("docs/architecture.md", "[a-z_]+")}
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        found = await (
            await connection.execute("select tablename from pg_tables where schemaname = 'public'")
        ).fetchall()
    assert listed == loops | {name for (name,) in found}


def test_every_invariant_is_on_the_page_on_architecture() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    assert re.findall(r"^\| I(\d+) \|", page, flags=re.MULTILINE) == [str(number) for number in range(1, 15)]


def section(page: str, heading: str) -> str:
    """The text below one heading of a page, up to the next one of any level."""
    text = (ROOT / page).read_text("utf-8")
    return re.split(r"^#+ ", text.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def listed(text: str) -> list[str]:
    """The names in the first cells of the tables of a text."""
    cells = re.findall(r"^\| (`[^|]+) \|", text, flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(?:await )?(\w+)[^`]*`", cell)]


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_all_that_a_context_has_is_on_the_page_on_python() -> None:
    names = listed(section("docs/python.md", "### The context"))
    assert sorted(names) == sorted(public(StepContext))


def test_all_that_the_context_of_a_workflow_has_is_on_the_page_on_workflows() -> None:
    names = listed(section("docs/workflows.md", "### The context"))
    for_the_run_in_memory = {"answer", "count"}
    assert sorted(names) == sorted(public(WorkflowContext) - for_the_run_in_memory)


def test_every_option_of_a_workflow_is_on_the_page_on_workflows() -> None:
    names = listed(section("docs/workflows.md", "## The function"))
    assert sorted(names) == sorted(inspect.signature(workflow).parameters.keys() - {"workflow_id"})


def test_every_option_of_what_a_workflow_asks_for_is_on_the_page_on_workflows() -> None:
    text = section("docs/workflows.md", "### The context")
    for name in ("run", "call", "child", "signal", "signals"):
        (row,) = re.findall(rf"^\| `{name}\(.*$", text, flags=re.MULTILINE)
        options = [it.name for it in inspect.signature(getattr(WorkflowContext, name)).parameters.values()]
        assert [it for it in options if it not in {"self", "args"} and not re.search(rf"\b{it}\b", row)] == []


def test_all_that_workflow_code_is_refused_is_on_the_page_on_determinism() -> None:
    text = section("docs/determinism.md", "## What is refused")
    names = {name.removeprefix("_") for _, names, _ in refused._FUNCTIONS for name in names}
    names |= set(refused._CLOCKS_WITHOUT) | {owner.__name__ for owner, *_ in refused._METHODS}
    assert len(names) > 50
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


def test_every_option_and_method_of_a_worker_is_on_the_page_on_python() -> None:
    names = listed(section("docs/python.md", "## Workers"))
    assert sorted(names) == sorted(public(Worker) | inspect.signature(Worker).parameters.keys())


def test_every_method_of_both_clients_is_on_the_page_on_python() -> None:
    names = listed(section("docs/python.md", "## Clients"))
    assert sorted(names) == sorted(public(Client)) == sorted(public(AsyncClient))
