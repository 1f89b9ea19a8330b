"""What a turn of workflow code refuses, whom it excuses, and that nobody else notices."""

from __future__ import annotations

import asyncio
import concurrent.futures  # noqa: F401 (an expression uses it)
import datetime as dt
import decimal
import importlib
import json
import logging
import os
import pickle
import random
import re
import secrets  # noqa: F401 (as above)
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import randint
from time import monotonic
from typing import Any

import pytest

from fencepost import AsyncClient, Client
from fencepost.deterministic import NonDeterministic, guarded, unguarded
from fencepost.deterministic.refused import escapes
from tests.unit.sdk.test_deterministic_loop import run

# Expressions, and what the refusal of each says.
REFUSED = {
    "time.time()": "time.time is not deterministic in a workflow: use ctx.now()",
    "time.time_ns()": "use ctx.now()",
    "time.monotonic()": "use ctx.now()",
    "time.perf_counter()": "use ctx.now()",
    "time.localtime()": "use ctx.now()",
    "time.gmtime(None)": "use ctx.now()",
    'time.strftime("%Y")': "use ctx.now()",
    "time.sleep(0)": "time.sleep is not deterministic in a workflow: use `await ctx.sleep(...)`",
    "random.random()": "random.random is not deterministic in a workflow: use ctx.random",
    "random.choice([1])": "random.choice",
    "random.shuffle([1])": "random.shuffle",
    "random.seed(1)": "random.seed",
    "randint(1, 6)": "use ctx.random",
    "random.Random()": "random.Random() without a seed",
    "random.Random(1).seed()": "random.Random() without a seed",
    "random.SystemRandom().random()": "random.SystemRandom",
    "secrets.token_hex()": "secrets.token_hex",
    "secrets.SystemRandom().choice([1])": "random.SystemRandom",
    "os.urandom(1)": "os.urandom",
    "uuid.uuid1()": "uuid.uuid1",
    "uuid.uuid4()": "uuid.uuid4 is not deterministic in a workflow: use ctx.uuid4()",
    "threading.Thread(target=print).start()": "starting a thread",
    "concurrent.futures.ThreadPoolExecutor().submit(print)": "an executor",
    'subprocess.run(["true"], check=False)': "starting a process",
    'os.system("true")': "os.system",
    "socket.socket()": "a socket",
    'socket.getaddrinfo("localhost", 1)': "socket.getaddrinfo",
    "asyncio.wait([])": "asyncio.wait is not deterministic in a workflow: use fencepost.wait",
    "asyncio.as_completed([])": "use fencepost.as_completed",
    "asyncio.TaskGroup().__aenter__()": "use fencepost.TaskGroup",
    "Client()": "a client is not deterministic in a workflow: start children with ctx.child(...), or use the client in",
    "AsyncClient()": "a client is not deterministic in a workflow: start children with ctx.child(...), or use the cl",
}


@pytest.mark.parametrize("expression", REFUSED)
def test_what_differs_between_replays_is_refused_with_what_to_use(expression: str) -> None:
    with guarded(), pytest.raises(NonDeterministic, match=re.escape(REFUSED[expression])):
        eval(expression)


def test_a_client_that_was_made_elsewhere_is_refused_too() -> None:
    client, async_client = Client("127.0.0.1:1", timeout=0.01), AsyncClient("127.0.0.1:1", timeout=0.01)
    run_handle = client.handle("r1")
    calls: list[Callable[[], object]] = [
        lambda: client.start_run("order"),
        run_handle.result,
        lambda: next(client.watch_run("r1")),
        lambda: client.schedules.get("s"),
        lambda: async_client.start_run("order").send(None),
        lambda: anext(async_client.watch_run("r1")).__await__().__next__(),
    ]
    for call in calls:
        with guarded(), pytest.raises(NonDeterministic, match="a client is not deterministic in a workflow"):
            call()


def test_asyncios_wait_that_was_imported_by_name_is_refused_too() -> None:
    with guarded():
        pass
    original = asyncio.wait.__wrapped__  # type: ignore[attr-defined]  # what a module would have imported

    async def main() -> None:
        with guarded():
            await original([asyncio.ensure_future(asyncio.sleep(0))])

    with pytest.raises(NonDeterministic, match="wait"):
        run(main())


def test_all_of_it_works_before_and_after_a_turn() -> None:
    with guarded():
        pass
    assert time.time() > 0
    assert time.localtime().tm_year > 2000
    assert 0 <= random.random() < 1
    assert len(os.urandom(4)) == 4
    assert uuid.uuid4().version == 4
    assert randint(3, 3) == 3
    with socket.socket():
        pass
    assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0


async def test_asyncio_works_as_ever_outside_of_turns() -> None:
    with guarded():
        pass
    async with asyncio.TaskGroup() as group:
        task = group.create_task(asyncio.sleep(0, "result"))
    done, _ = await asyncio.wait([task])
    assert [each.result() for each in done] == ["result"]
    assert [await each for each in asyncio.as_completed([asyncio.sleep(0, 1)])] == [1]
    assert await asyncio.to_thread(lambda: 5) == 5


def test_other_threads_notice_nothing_of_a_turn() -> None:
    seen: list[float] = []
    in_turn, looked = threading.Event(), threading.Event()

    def look() -> None:
        assert in_turn.wait(30)
        seen.extend((time.time(), random.random()))
        looked.set()

    other = threading.Thread(target=look)
    other.start()
    with guarded():
        in_turn.set()
        assert looked.wait(30)
    other.join(30)
    assert len(seen) == 2


def test_turns_nest_and_an_unguarded_stretch_of_one_is_free() -> None:
    with guarded():
        with guarded():
            pass
        with unguarded():
            assert time.time() > 0
            with guarded(), pytest.raises(NonDeterministic):
                time.time()
        with pytest.raises(NonDeterministic):
            time.time()


def test_an_error_ends_a_turn() -> None:
    with pytest.raises(ValueError, match="error"), guarded():
        raise ValueError("error")
    assert time.time() > 0


def test_logging_works_in_a_turn_with_handlers_and_formatters_that_look_at_the_clock(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"{time.time():.0f} {uuid.uuid4()} {super().format(record)}"

    log = logging.getLogger("test of turns")
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    try:
        with guarded():
            log.warning("in a turn")
    finally:
        log.removeHandler(handler)
        handler.close()
    assert "in a turn" in caplog.text
    assert "in a turn" in (tmp_path / "log").read_text()


def test_pure_libraries_work_in_a_turn() -> None:
    with guarded():
        assert json.loads(json.dumps({"a": 1})) == {"a": 1}
        assert decimal.Decimal("1.1") * 2 == decimal.Decimal("2.2")
        assert dt.datetime.fromisoformat("2026-01-01T00:00:00+00:00") + dt.timedelta(1) > dt.datetime.fromtimestamp(
            0, dt.UTC
        )
        assert dt.datetime.strptime("2026-01-01 +0000", "%Y-%m-%d %z").strftime("%Y") == "2026"
        assert uuid.uuid5(uuid.NAMESPACE_URL, "a") == uuid.uuid5(uuid.NAMESPACE_URL, "a")
        assert uuid.UUID(int=1).int == 1
        assert random.Random(5).random() == random.Random(5).random()
        seeded = random.Random("text")
        seeded.seed(a=7)
        assert seeded.choice([1]) == 1
        assert time.gmtime(0).tm_year == 1970
        assert time.strftime("%Y", time.gmtime(0)) == "1970"


def test_a_module_may_read_the_clock_while_a_turn_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reads_the_clock.py").write_text("import time, uuid\nSTARTED = time.time()\nNAME = uuid.uuid4()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with guarded():
        assert importlib.import_module("reads_the_clock").STARTED > 0
    del sys.modules["reads_the_clock"]


def test_destructors_of_strangers_run_in_a_turn_as_elsewhere() -> None:
    seen: list[float] = []

    class Stranger:
        def __del__(self) -> None:
            seen.append(time.monotonic())

    strangers = [Stranger()]
    with guarded():
        strangers.clear()
    assert len(seen) == 1


def test_a_replaced_function_looks_and_behaves_like_the_original() -> None:
    with guarded():
        pass

    class Holder:
        clock: Any = time.monotonic

    assert Holder().clock() > 0
    assert time.time.__name__ == "time"
    assert pickle.loads(pickle.dumps(time.time)) is time.time
    assert "built-in function time" in repr(time.time)


# What follows is looked at, not run.
def reads_unseen_clocks() -> object:
    def inner() -> float:
        return monotonic()

    return inner, dt.datetime.now(dt.UTC), [dt.date.today() for _ in "a"]  # noqa: DTZ011


def reads_nothing() -> object:
    return dt.datetime.fromtimestamp(0, dt.UTC), time.time


@pytest.fixture
def _early_import() -> Iterator[None]:
    # The module of this test may have been imported after the guards were installed; an original is what matters.
    with guarded():
        pass
    name: Any = "monotonic"
    before = globals()[name]
    globals()[name] = time.monotonic.__wrapped__  # type: ignore[attr-defined]  # as above
    yield
    globals()[name] = before


@pytest.mark.usefixtures("_early_import")
def test_what_the_guards_cannot_see_can_be_found_in_a_functions_code() -> None:
    assert escapes(reads_unseen_clocks) == [
        "monotonic is time.monotonic: use ctx.now()",
        "datetime.now() reads the clock: use ctx.now()",
        "date.today() reads the clock: use ctx.now()",
    ]
    assert escapes(reads_nothing) == []
    assert escapes(len) == []
