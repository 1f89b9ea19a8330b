"""The pytest plugin: a server for each test that asks for one, and nothing at all for others.

Each project here is a folder with tests of its own, run by a pytest of its own; its servers are on an embedded
PostgreSQL, as in anybody's project.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

TIMEOUT = 120
ASYNCIO = ("-p", "pytest_asyncio.plugin", "-o", "asyncio_default_fixture_loop_scope=function")
DISTRIBUTION = ROOT / "worker_sdk" / "python"

STEPS = """
    import datetime as dt
    from fencepost import RunState, step

    DAY = dt.timedelta(days=1)
    NODES = [{"id": "nap", "sleep": "30d"}, {"id": "n", "step": "n"}]
    MANIFEST = {"id": "wf", "compatibility_id": "1", "sequence": NODES}

    @step("n")
    def n(value: object) -> object:
        return value
"""

BOTH_WAYS = f"""
    import pytest
    {STEPS}

    def test_plain(fencepost_env):
        fencepost_env.client.register_definition(MANIFEST)
        with fencepost_env.worker([n]):
            assert fencepost_env.run("wf", 1) == 1

    @pytest.mark.asyncio
    async def test_async(fencepost_env):
        assert [run async for run in fencepost_env.client.list_runs()] == []
        await fencepost_env.client.register_definition(MANIFEST)
        async with fencepost_env.worker([n]):
            assert await fencepost_env.run("wf", 2) == 2

    class TestMarked:
        pytestmark = pytest.mark.fencepost(auto_skip=True, patience=0.2)

        @pytest.mark.fencepost(auto_skip=False)
        def test_marked(self, fencepost_env):
            fencepost_env.client.register_definition(MANIFEST)
            run = fencepost_env.client.start_run("wf")
            fencepost_env.skip(29 * DAY)
            assert run.get().state is RunState.WAITING
            fencepost_env.skip(1 * DAY)
            assert run.get().state is RunState.RUNNING
"""

BOTH_CLASSES_IMPORTED = """
    from fencepost.testing import TestServer

    def test_nothing():
        assert TestServer.start()
"""


def run_python(*arguments: str, folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run Python in a folder, on this checkout; returns what it has printed. Fails with it unless it ended well."""
    path = os.pathsep.join([str(DISTRIBUTION), str(ROOT / "server")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **(variables or {})}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_tests(folder: Path, text: str, *arguments: str) -> str:
    """Run a project with one module of tests, whose pytest takes every warning for an error."""
    (folder / "test_project.py").write_text(textwrap.dedent(text), "utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n", "utf-8")
    options = ["-p", "fencepost_pytest", "-p", "no:cacheprovider", *arguments]
    return run_python("-m", "pytest", *options, folder=folder)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of the programs that a test runs: nobody else's. PostgreSQL may enter it."""
    with tempfile.TemporaryDirectory(prefix="fencepost-own-") as folder:
        Path(folder).chmod(0o711)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def left_over(temporary: Path) -> list[Path]:
    return list(temporary.glob("fencepost-testkit-*"))


def test_plain_and_async_tests_get_the_environment_that_suits_them(tmp_path: Path, temporary: Path) -> None:
    printed = run_tests(tmp_path, BOTH_WAYS, *ASYNCIO)
    assert "3 passed" in printed
    assert left_over(temporary) == [], "the embedded PostgreSQL is gone with its folder"


def test_it_needs_no_plugin_for_loops_and_works_with_another_one(tmp_path: Path) -> None:
    text = BOTH_WAYS.replace("@pytest.mark.asyncio", "@pytest.mark.anyio")
    pytest.importorskip("anyio.pytest_plugin")
    assert "passed" in run_tests(tmp_path, text, "-p", "anyio.pytest_plugin", "-k", "not trio")


def test_an_option_without_its_name_is_told_and_not_passed_over(tmp_path: Path) -> None:
    text = """
        import pytest

        @pytest.fixture
        def refused(request):
            with pytest.raises(pytest.UsageError, match="takes options by name"):
                request.getfixturevalue("fencepost_env")

        @pytest.mark.fencepost(False)
        def test_marked(refused):
            pass
    """
    assert "1 passed" in run_tests(tmp_path, text)


def test_the_names_of_the_kit_are_not_taken_for_tests(tmp_path: Path) -> None:
    assert "1 passed" in run_tests(tmp_path, BOTH_CLASSES_IMPORTED)


def test_the_plugin_can_be_named_by_a_project(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["fencepost.testing.pytest_plugin"]\n', "utf-8")
    assert "passed" in run_tests(tmp_path, BOTH_WAYS, *ASYNCIO, "-k", "plain")


def test_a_project_that_does_not_use_it_loads_neither_the_sdk_nor_the_server(tmp_path: Path) -> None:
    text = """
        import sys

        def test_nothing():
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert "fencepost_pytest" in loaded
            assert not loaded & {"fencepost", "fencepost_server", "grpc", "asyncio.runners"}
    """
    assert "1 passed" in run_tests(tmp_path, text)


def test_pytest_finds_the_plugin_where_the_distribution_says() -> None:
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text("utf-8"))
    [(name, module)] = project["project"]["entry-points"]["pytest11"].items()
    assert name == module, "else a project that names it would have it twice"
    assert callable(import_module(module).pytest_configure)
    assert module in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_what_is_not_installed_is_named_with_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "try_it.py").write_text(
        textwrap.dedent(
            """
            import sys
            sys.modules["fencepost_server"] = None

            from fencepost.testing import KitMissing, TestServer

            try:
                with TestServer.start():
                    pass
            except KitMissing as error:
                print(error)
            """
        ),
        "utf-8",
    )
    printed = run_python("try_it.py", folder=tmp_path)
    assert re.search(r"not installed: in a checkout: pip install \./worker_sdk/python '\./server\[dev\]'", printed)


def test_a_server_that_nobody_stopped_goes_with_its_process(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "try_it.py").write_text(
        "from fencepost.testing import TestServer\nenv = TestServer.start().__enter__()\nprint(env.now().tzinfo)\n",
        "utf-8",
    )
    assert "UTC" in run_python("try_it.py", folder=tmp_path)
    assert left_over(temporary) == []
