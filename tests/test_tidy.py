"""Lints the repository: what the house style promises and no other tool holds.

Each test gathers every finding before it fails, so that one run tells all. Files are those that git would
commit: tracked ones, and new ones that it does not ignore.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fencepost.v1 import error_pb2
from fencepost_server.config import Config
from fencepost_server.domain.errors import FencepostError

ROOT = Path(__file__).resolve().parent.parent

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 70
# Modules that may be longer, each with the reason why splitting it would make it harder to read.
LONG_MODULES: dict[str, str] = {}

VAGUE_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

# Environment variables with the server's prefix that are not settings of a server.
OTHER_VARIABLES = {
    "FENCEPOST_ADDRESS": "where the command line's client commands find a server",
    "FENCEPOST_NAMESPACE": "the namespace of the command line's client commands",
    "FENCEPOST_TEST_DSN": "the database that the tests use in place of one of their own",
}

# Tests that may let time pass, by pattern, each with the reason. All others wait on conditions, or say `paced`.
SLEEPERS = {
    "tests/fixtures/waiting.py": "eventually, wait_until and paced themselves",
    "tests/fixtures/databases.py": "waits for a process to end, with a limit and without what is under test",
    "tests/fixtures/postgres_server.py": "waits for processes of PostgreSQL, with a limit, without an event loop",
    "tests/fixtures/proxy.py": "a slow link",
    "tests/properties/scene.py": "waits on a condition, with a limit, and tells the whole story when it is over",
    "tests/determinism/playing.py": "steps and workflows that take time",
    "tests/examples/test_documents.py": "a step that takes time",
    "tests/faults/code_program.py": "steps and workflows that take time",
    "tests/golden/workflows.py": "workflows, whose sleeps are timers",
    "tests/sdk/test_*.py": "steps that take time, or block a thread or the loop",
    "tests/sdk/worker_program.py": "steps that hang",
    "tests/unit/sdk/random_programs.py": "workflows, whose sleeps are timers",
    "tests/unit/sdk/test_code_*.py": "workflows, whose sleeps are timers",
    "tests/unit/sdk/test_deterministic_*.py": "code whose loop has a clock of its own: no time passes",
    "tests/unit/sdk/test_executor*.py": "steps that hang until they are cancelled",
    "tests/unit/sdk/test_local_steps.py": "functions that take time, or hang until they are cancelled",
}
CLOCK_OF_ITS_OWN = "tests/unit/sdk/test_deterministic_*.py"

SQL = re.compile(
    r"\s*(select\b.+\bfrom|insert\s+into|update\s+\S+\s+set|delete\s+from|with\s+\w+\s+as\s*\(|listen\s+\w+$"
    r"|(create|alter|drop|truncate)\s+(table|index|schema|database|function|role)|set\s+local)\b",
    re.IGNORECASE | re.DOTALL,
)
REGISTRY_HOST = re.compile(
    r"\b(pypi|test\.pypi|files\.pythonhosted|registry\.npmjs|registry\.yarnpkg|index\.crates|static\.crates"
    r"|proxy\.golang|sum\.golang|repo\d?\.maven|deb\.debian)\.(org|io|com|apache\.org)\b"
)
HOME_PATH = re.compile(r"(?<![\w.~$}-])/(home/[a-z_][\w-]*|Users/[A-Za-z][\w-]*|root)/")


@functools.cache
def files() -> tuple[Path, ...]:
    """All files of the repository, as git sees it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60).stdout
    paths = (ROOT / name for name in sorted(set(listing.decode().split("\0"))) if name)
    return tuple(path for path in paths if path.is_file())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def texts() -> Iterator[tuple[str, str]]:
    """Name and content of every text file."""
    for path in files():
        content = path.read_bytes()
        if b"\0" not in content:
            yield name_of(path), content.decode("utf-8")


def modules() -> Iterator[tuple[str, str]]:
    """Name and source of every hand-written Python module."""
    for name, text in texts():
        if name.endswith(".py") and not name.endswith(("_pb2.py", "_pb2_grpc.py")):
            yield name, text


def may_speak_sql(name: str) -> bool:
    return name.startswith(("server/fencepost_server/store/", "tests/", "benchmarks/", "examples/"))


def string_literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and value of every string that is not a docstring; of an f-string, its literal parts in one."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            yield node.lineno, "".join(map(str, parts))


def imported_packages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module.partition(".")[0]


def test_no_module_is_longer_than_its_limit() -> None:
    lengths = {name: len(text.splitlines()) for name, text in modules()}
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_MODULE_LINES}
    assert sorted(too_long.keys() - LONG_MODULES.keys()) == []
    assert sorted(LONG_MODULES.keys() - too_long.keys()) == [], "no longer long, or gone: take it off the list"


def test_no_function_is_longer_than_its_limit() -> None:
    found = []
    for name, text in modules():
        for node in ast.walk(ast.parse(text, name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{name}:{node.lineno} {node.name} has {lines} lines")
    assert found == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [name for name, _ in modules() if VAGUE_NAMES & set(Path(name).with_suffix("").parts)] == []


def test_only_the_store_and_what_tries_it_speak_sql() -> None:
    found = []
    for name, text in modules():
        if may_speak_sql(name):
            continue
        tree = ast.parse(text, name)
        found += [f"{name}:{line} imports {p}" for line, p in imported_packages(tree) if p.startswith("psycopg")]
        found += [f"{name}:{line} {value[:60]!r}" for line, value in string_literals(tree) if SQL.match(value)]
    for path in files():
        if path.suffix == ".sql" and not may_speak_sql(name_of(path)):
            found.append(name_of(path))
    assert found == []


def sleeps(tree: ast.AST, function: str = "") -> Iterator[tuple[int, str]]:
    """Line of every call that lets time pass, and the function that it stands in. One of 0 s only yields."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"asyncio.sleep", "time.sleep"}:
            yields = [ast.unparse(given) for given in node.args] in ([], ["0"])
            if not yields:
                yield node.lineno, inside
        if isinstance(node, ast.ImportFrom) and node.module in {"asyncio", "time"}:
            yield from ((node.lineno, f"from {node.module}") for alias in node.names if alias.name == "sleep")
        yield from sleeps(node, inside)


def test_no_test_sleeps() -> None:
    found, met = [], set()
    for name, text in modules():
        patterns = {pattern for pattern in SLEEPERS if fnmatch.fnmatch(name, pattern)}
        for line, function in sleeps(ast.parse(text, name)) if name.startswith("tests/") else ():
            met |= patterns
            in_test = function.startswith("test_") and not fnmatch.fnmatch(name, CLOCK_OF_ITS_OWN)
            if in_test or not patterns:
                found.append(f"{name}:{line} {function} sleeps")
    assert found == []
    assert sorted(SLEEPERS.keys() - met) == [], "sleeps no longer, or is gone: take it off the list"


def test_no_file_names_a_package_registry_or_somebodys_folder() -> None:
    found = []
    for name, text in texts():
        for number, line in enumerate(text.splitlines(), 1):
            if REGISTRY_HOST.search(line) or HOME_PATH.search(line) or f"{ROOT}/" in line:
                found.append(f"{name}:{number} {line.strip()[:80]}")
    assert found == []


def without_code(markdown: str) -> str:
    """The prose of a Markdown text: fenced blocks and code spans left out."""
    prose = re.sub(r"^( *)(```|~~~).*?^ *\2[^\n]*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", "", prose)


def anchors(markdown: str) -> set[str]:
    """The names by which the headings of a Markdown text are linked to."""
    prose = re.sub(r"^( *)(```|~~~).*?^ *\2[^\n]*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    names: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', prose))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose, flags=re.MULTILINE):
        slug = base = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        repeats = 0
        while slug in names:
            repeats += 1
            slug = f"{base}-{repeats}"
        names.add(slug)
    return names


def broken_links(name: str, text: str) -> Iterator[str]:
    """The relative links of one Markdown file that lead to no file, or to no heading of it."""
    prose = without_code(text)
    targets = re.findall(r"!?\[[^]]*]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", prose)
    targets += re.findall(r"^ {0,3}\[[^]]+]:\s*<?(\S+?)>?(?:\s|$)", prose, flags=re.MULTILINE)
    for target in targets:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        place, _, anchor = target.partition("#")
        path = (ROOT / name).parent / place if place else ROOT / name
        if not path.exists() or ROOT not in (path.resolve(), *path.resolve().parents):
            yield f"{name}: {target} leads nowhere"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text("utf-8")):
            yield f"{name}: {target} names no heading"


def test_every_relative_link_in_the_documentation_leads_somewhere() -> None:
    pages = [(name, text) for name, text in texts() if name.endswith(".md")]
    assert [fault for name, text in pages for fault in broken_links(name, text)] == []


def test_every_setting_of_the_server_is_documented() -> None:
    fields = dataclasses.fields(Config)
    assert [field.name for field in fields if not str(field.metadata.get("doc", "")).strip()] == []


def test_every_environment_variable_that_is_named_somewhere_exists() -> None:
    known = {f"FENCEPOST_{field.name.upper()}" for field in dataclasses.fields(Config)} | OTHER_VARIABLES.keys()
    found = []
    for name, text in texts():
        # Tests name settings that do not exist, to see them refused.
        if not name.startswith("tests/"):
            words = re.findall(r"\bFENCEPOST_[A-Z0-9_]*[A-Z0-9]\b", text)
            found += [f"{name}: {word}" for word in words if word not in known]
    assert found == []


def reasons() -> list[str]:
    """The error reasons of the contract, without their prefix."""
    return [name.removeprefix("ERROR_REASON_") for name, number in error_pb2.ErrorReason.items() if number]


def error_classes() -> Iterator[type[FencepostError]]:
    """The classes of errors that are raised: those without subclasses."""
    remaining = [FencepostError]
    while remaining:
        parent = remaining.pop()
        remaining += parent.__subclasses__()
        if not parent.__subclasses__():
            yield parent


def test_every_error_reason_has_its_class_and_every_class_its_reason() -> None:
    assert sorted(error.reason for error in error_classes()) == sorted(reasons())


def test_every_error_reason_has_its_row_in_the_documentation() -> None:
    table = (ROOT / "docs" / "errors.md").read_text("utf-8")
    rows = re.findall(r"^\| *`?([A-Z][A-Z0-9_]+)`? *\|", table, flags=re.MULTILINE)
    assert sorted(rows) == sorted(reasons())


def test_every_error_reason_is_met_in_a_test() -> None:
    sources = "\n".join(text for name, text in modules() if name.startswith("tests/") and name != "tests/test_tidy.py")
    words = set(re.findall(r"\w+", sources))
    names = {error: {error.reason, f"ERROR_REASON_{error.reason}", error.__name__} for error in error_classes()}
    assert sorted(error.reason for error, spellings in names.items() if not words & spellings) == []
