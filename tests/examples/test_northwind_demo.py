"""The whole demo of the Northwind example, as a process."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
from psycopg.conninfo import make_conninfo

from examples.northwind import demo
from examples.northwind.dataset import load
from examples.northwind.reconciliation import expected_totals
from fencepost_server.embedded import EmbeddedPostgres
from tests.examples.orders import reconciled
from tests.fixtures.postgres_server import has_ended
from tests.fixtures.processes import Process
from tests.fixtures.waiting import wait_until

LIMIT = 150.0  # seconds, of which a slow machine takes most to start all of its processes
LAST_LINE = re.compile(
    r"demo: (\d+) completed, (\d+) undone of (\d+) orders, net ([\d.]+) kept, ([\d.]+) refunded, "
    r"(\d+) lost, (\d+) repeated effects, (\d+) steps in (\d+\.\d) s"
)


def test_the_demo_fills_or_undoes_every_order_once_though_a_worker_is_killed(
    python_process: Callable[..., Process], folder: Path
) -> None:
    demo = python_process(
        *("-m", "examples.northwind", "--orders", "60"), TMPDIR=str(folder), FENCEPOST_DISCONNECT_GRACE="1.5"
    )
    assert demo.wait(timeout=LIMIT) == 0, demo.logs
    lines = demo.logs.splitlines()
    found = LAST_LINE.fullmatch(lines[-1])
    assert found is not None, demo.logs
    wanted = expected_totals(load(60))
    assert found.groups()[:8] == ("40", "20", "60", f"{wanted.kept:.4f}", f"{wanted.refunded:.4f}", "0", "0", "360")
    assert any(
        re.search(r"worker-[12] is killed \(SIGKILL\) while it holds .*: refund of order", line) for line in lines
    )
    assert any(re.search(r"worker-[123] goes on with refund of .* after the kill", line) for line in lines), demo.logs
    assert list(folder.iterdir()) == []


def test_a_demo_whose_charges_are_not_refunded_says_so_and_fails(
    python_process: Callable[..., Process], folder: Path
) -> None:
    manifest = folder.with_name(f"{folder.name}.yaml")
    text = demo.MANIFEST.read_text("utf-8")
    manifest.write_text(re.sub(r"    undo: \{step: northwind\.refund.*\n", "", text), "utf-8")
    code = (
        "import pathlib, sys; from examples.northwind import __main__, demo; "
        "demo.MANIFEST = pathlib.Path(sys.argv.pop(1)); sys.exit(__main__.main())"
    )
    broken = python_process("-c", code, str(manifest), "--orders", "3", TMPDIR=str(folder))
    try:
        assert broken.wait(timeout=LIMIT) == 1
    finally:
        manifest.unlink()
    lines = broken.logs.splitlines()
    assert "DIFFERENCE: order 10248, refund: the effect is lost: VINET 440.00" in lines
    found = LAST_LINE.fullmatch(lines[-1])
    assert found is not None, broken.logs
    assert found.groups()[:8] == ("2", "0", "3", "3856.0000", "0.0000", "1", "0", "17")
    assert list(folder.iterdir()) == []


def test_an_interrupted_demo_leaves_no_process_and_no_file(
    python_process: Callable[..., Process], folder: Path
) -> None:
    demo = python_process("-m", "examples.northwind", TMPDIR=str(folder))
    demo.wait_logged("830 orders are submitted", LIMIT)
    started = psutil.Process(demo.pid).children(recursive=True)
    assert len(started) > 3
    demo.signal(signal.SIGINT)
    assert demo.wait(timeout=LIMIT) == 130
    wait_until(lambda: all(map(has_ended, started)))
    assert list(folder.iterdir()) == []


def test_a_demo_that_loses_its_server_fails_and_leaves_no_process_and_no_file(
    python_process: Callable[..., Process], folder: Path
) -> None:
    demo = python_process("-m", "examples.northwind", TMPDIR=str(folder))
    demo.wait_logged("830 orders are submitted", LIMIT)
    started = psutil.Process(demo.pid).children(recursive=True)
    server = next(process for process in started if "fencepost_server.cli" in process.cmdline())
    server.kill()
    assert demo.wait(timeout=LIMIT) == 1
    assert "demo: failed: " in demo.logs
    wait_until(lambda: all(map(has_ended, started)))
    assert list(folder.iterdir()) == []


def test_the_data_can_be_kept(python_process: Callable[..., Process], folder: Path) -> None:
    demo = python_process(
        *("-m", "examples.northwind", "--orders", "3", "--keep"), TMPDIR=str(folder), FENCEPOST_DISCONNECT_GRACE="1.5"
    )
    assert demo.wait(timeout=LIMIT) == 0
    (kept,) = folder.iterdir()
    assert f"fencepost dev --data-dir {kept / 'data'}" in demo.logs
    with EmbeddedPostgres(kept / "data") as postgres:
        ledger_dsn = make_conninfo(postgres.dsn, dbname="northwind")
        with psycopg.connect(ledger_dsn, autocommit=True) as ledger:
            assert reconciled(load(3), ledger).differences == ()
