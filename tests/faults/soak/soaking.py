"""One soak: the load, the faults, quiet, and the checker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from tests.faults.scene import fetch
from tests.faults.soak.checker import check
from tests.faults.soak.conductor import Conductor
from tests.faults.soak.faults import KINDS, Act, Fault
from tests.faults.soak.findings import Finding, Rule
from tests.faults.soak.levels import Levels
from tests.faults.soak.load import Acked, Load
from tests.faults.soak.report import Report
from tests.faults.soak.stage import Stage
from tests.faults.soak.tables import AT_WORK, sizes
from tests.faults.soak.watcher import Watcher
from tests.fixtures.api import Api
from tests.fixtures.waiting import paced

AT_ONCE = 24
MOST_STORIES = 20
MOST_ERRORS = 20
_ERROR = re.compile(r'^(?:\{.*"level": "(?:error|critical)"|\S+ \S+ (?:ERROR|CRITICAL) ).*$', re.MULTILINE)
"""A line of a server's log, or of a worker's."""
_RUN_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Part = Callable[[], Coroutine[Any, Any, None]]
QUIET = 150.0
"""How long what is under way may take when the faults are over: a lease, its backoff, and every script."""


async def play(load: Load, watches: Sequence[Part], faults: Part) -> None:
    """Run the load, and what watches it, while faults come upon it; then until the load has ended.

    All stand or fall together: whichever fails first ends the others, and what it raised is raised here. A soak
    without its load, or that nobody watches, would find nothing wrong.
    """
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(watch()) for watch in watches]
        await load.prepare()
        running = group.create_task(load.run())
        await faults()
        await load.stop()
        await _quiet(running)
        for task in watching:
            task.cancel()


async def soak(
    stage: Stage,
    seed: int,
    plan: Sequence[Fault],
    every: float,
    *,
    at_once: int = AT_ONCE,
    acts: Mapping[str, Act] = KINDS,
) -> Report:
    """Play a plan on a stage under load, then check all there is."""
    begin = time.monotonic()
    report = Report(seed)
    watcher = Watcher(stage.dsn)
    load = Load(stage.target, watcher, stage.sink, seed, at_once)
    levels = Levels(stage)
    conductor = Conductor(stage, watcher, acts)
    try:
        await play(load, (watcher.watch, levels.watch), partial(conductor.run, plan, every))
        report.findings = [*_ended_by_themselves(stage), *_unanswered(load), *await _check(stage, load.acked)]
        report.findings += errors_told(logs(stage))
        report.stories = await _stories(stage, report.findings)
    finally:
        await watcher.close()
        await load.close()
    report.faults, report.recoveries = conductor.counts, conductor.recoveries
    report.levels = levels.found()
    report.programs = load.ended
    report.findings += [Finding(Rule.LEVELS, str(level)) for level in report.levels if level.grown]
    report.findings += [Finding(Rule.BOUND, text) for text in report.recoveries.late()]
    report.findings += [Finding(Rule.STUCK, f"nothing went on after {fault}") for fault in report.recoveries.none]
    acked = load.acked
    report.acknowledged = Counter(start=len(acked.starts), signal=len(acked.signals))
    report.acknowledged.update(what for _, _, what in acked.controls)
    report.runs, report.events = await sizes(stage.dsn)
    _count_trials(stage, report)
    report.seconds = time.monotonic() - begin
    report.findings += report.missing()
    return report


def _ended_by_themselves(stage: Stage) -> list[Finding]:
    """Workers and servers go on, whatever happens to others: those that are not there, or were not when a fault came to
    them.
    """
    for process in (*stage.workers, *stage.servers):
        stage.note_end(process)
    return [Finding(Rule.STUCK, text) for text in stage.ended]


def errors_told(logs: Mapping[str, str]) -> list[Finding]:
    """What comes from outside is no error of a server or worker: they wait for the database, or warn of it.
    So each of these is a fault of the product, though nothing may have come of it.
    """
    return [
        Finding(Rule.FAULT, f"{name}: {line[0][:500]}")
        for name, text in logs.items()
        for line in itertools.islice(_ERROR.finditer(text), MOST_ERRORS)
    ]


def _unanswered(load: Load) -> list[Finding]:
    """Programs that have not ended when all was over, be it only that a caller of theirs still waits for an answer."""
    return [Finding(Rule.STUCK, f"{each} has not come to its end") for each in sorted(load.under_way)]


async def _quiet(running: asyncio.Task[None]) -> None:
    """Wait until all programs have ended; those that have not stay in ``load.under_way``."""
    _, late = await asyncio.wait([running], timeout=QUIET)
    if late:
        running.cancel()


async def _check(stage: Stage, acked: Acked) -> list[Finding]:
    await _ended(stage.dsn)
    api = Api(stage.servers[0].grpc_address)
    try:
        return await check(stage.dsn, api, stage.sink, acked)
    finally:
        await api.close()


async def _stories(stage: Stage, findings: Sequence[Finding]) -> dict[str, str]:
    """The histories of the runs that findings name, and what their steps did outside."""
    named = {run_id for finding in findings for run_id in _RUN_ID.findall(finding.text)}
    trials = stage.sink.trials()
    api = Api(stage.servers[0].grpc_address)
    found = {}
    try:
        for run_id in sorted(named)[:MOST_STORIES]:
            with contextlib.suppress(AssertionError, grpc.aio.AioRpcError):  # it has gaps, or is not there
                events = await api.history(run_id, page_size=1000)
                acted = [str(trial) for trial in trials if trial.run_id == run_id]
                found[run_id] = "\n".join([str(await api.get(run_id)), *map(str, events), *acted])
    finally:
        await api.close()
    return found


async def _ended(dsn: str) -> None:
    """Children that were let go, and undo work, may go on for a while after their programs."""
    end = time.monotonic() + QUIET
    while time.monotonic() < end:
        if not await fetch(dsn, AT_WORK):
            return
        await paced(0.2)


def _count_trials(stage: Stage, report: Report) -> None:
    trials = stage.sink.trials()
    report.trials = len(trials)
    report.refused = sum(trial.verdict == "refused" for trial in trials)
    report.known = sum(trial.verdict == "known" for trial in trials)


def logs(stage: Stage) -> dict[str, str]:
    """What every process has printed, for whoever looks into a finding."""
    paths = [Path(process.log_path) for process in (*stage.servers, *stage.workers)]
    return {path.name: path.read_text(errors="replace") for path in paths if path.exists()}
