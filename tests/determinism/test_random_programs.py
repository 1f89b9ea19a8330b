"""Programs made by chance, lived through real servers and workers that are killed, end as their histories say, and are
replayed to the same in every process.

DETERMINISM_PROGRAMS says how many, DETERMINISM_FIRST the seed of the first one, DETERMINISM_PYTHONS (see `pythons`) on
what else than this Python they are replayed. The seeds of those that were lived through come with a failure.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from tests.determinism.checking import check_chain
from tests.determinism.living import QUICK, Life, Lived
from tests.determinism.pythons import ROOT, environment, usable
from tests.determinism.replaying import write
from tests.fixtures.processes import Process
from tests.fixtures.servers import StartServerProcess

PROGRAMS = int(os.environ.get("DETERMINISM_PROGRAMS", "24"))
FIRST = int(os.environ.get("DETERMINISM_FIRST", "0"))
HASH_SEEDS = ("0", "1", "2", "3", "4")
REPLAYS = 50
KINDS = {
    "run_started", "local_step_ended", "step_scheduled", "step_completed", "step_failed", "step_retrying",
    "timer_started", "timer_fired", "signal_awaited", "signal_received", "child_scheduled", "child_ended",
    "op_cancelled", "patch_marked", "attributes_set", "run_ending", "run_completed", "run_failed", "run_cancelled",
    "run_continued", "input_built", "undo_scheduled", "undo_completed",
}  # fmt: skip
"""What the programs are to bring about; the rest is in the golden histories."""


async def test_runs_that_outlive_workers_and_servers_end_as_their_histories_say_and_are_replayed_to_the_same(
    server_process: StartServerProcess, python_process: Callable[..., Process], dsn: str, tmp_path: Path
) -> None:
    def start_worker(address: str, cache: str) -> Process:
        return python_process("-m", "tests.determinism.worker_program", address, cache)

    life = Life(server_process(dsn, **QUICK), dsn, start_worker, Random(FIRST))
    chains = await life.live(range(FIRST, FIRST + PROGRAMS))
    lived = [each for chain in chains for each in chain]
    keep(tmp_path, lived)
    for chain in chains:
        check_chain(chain)

    told = await replayed_everywhere(tmp_path)
    assert len(set(told.values())) == 1, {python: text for python, text in told.items() if text != min(told.values())}
    some = next(iter(told.values())).splitlines()
    histories = len(lived) + sum(len(each.children) for each in lived)
    assert len(some) == histories, "each history was replayed"

    kinds = Counter(event.WhichOneof("kind") or "" for each in lived for event in each.events)
    sys.stdout.write(
        f"{PROGRAMS} programs from {FIRST}: {life.kills} kills, {histories} histories, {kinds.total()} events, "
        f"on {sorted({python for python, _ in told})}\n"
    )
    assert life.kills["worker"] > 0
    assert life.kills["server"] > 0
    assert PROGRAMS < 24 or set(kinds) >= KINDS, KINDS - set(kinds)


def keep(folder: Path, lived: Sequence[Lived]) -> None:
    """Write down all histories, for the replays and for who looks into a failure."""
    for each in lived:
        write(folder, each.run.run_id, each.events)
        (folder / f"{each.run.run_id}.run").write_bytes(each.run.SerializeToString())
        for run_id, events in each.children.items():
            write(folder, run_id, events)


async def replayed_everywhere(folder: Path) -> dict[tuple[str, str], str]:
    """What replays of all histories have said, by Python and hash seed."""
    room = asyncio.Semaphore(2)

    async def replayed(python: str, hash_seed: str) -> str:
        times = str(REPLAYS // len(HASH_SEEDS))
        command = (python, "-W", "error", "-m", "tests.determinism.replaying", str(folder), times)
        async with room:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=environment(hash_seed), stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                told, errors = await asyncio.wait_for(process.communicate(), 60 + PROGRAMS)
            finally:
                if process.returncode is None:
                    process.kill()
        assert process.returncode == 0, errors.decode()
        return told.decode()

    keys = [(python, hash_seed) for python in usable().values() for hash_seed in HASH_SEEDS]
    return dict(zip(keys, await asyncio.gather(*(replayed(*key) for key in keys)), strict=True))
