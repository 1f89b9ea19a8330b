"""One order of all that happens in a workflow: in every process, whatever its hashes, addresses and Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fencepost

SEEDS = ("0", "1", "2", "3", "4")

# A program begins with this: a host, and garbage of varying size, so that addresses differ from process to process.
BEFORE = """
import asyncio, random
from fencepost.deterministic import DeterministicLoop, TaskGroup, as_completed, wait, wait_for

class Host:
    now, timers = 0.0, []
    def time(self): return self.now
    def timer(self, delay, fire):
        self.timers.append((self.now + delay, fire))
        return fire
    def cancel_timer(self, token):
        self.timers = [timer for timer in self.timers if timer[1] is not token]

seen, garbage, noise = [], [], random.SystemRandom()

def mess():
    garbage.extend(bytearray(noise.randrange(1, 500)) for _ in range(noise.randrange(40)))
"""

# And ends with this.
AFTER = """
host = Host()
loop = DeterministicLoop(host)
task = loop.create_task(main())
loop.run_until_blocked()
while host.timers:
    host.timers.sort(key=lambda timer: timer[0])
    host.now, fire = host.timers.pop(0)
    fire()
    loop.run_until_blocked()
task.result()
print(seen)
"""

WAITING = """
async def step(name, seconds, fails=False):
    try:
        seen.append(f"begin {name}")
        await asyncio.sleep(seconds)
        if fails:
            raise ValueError(name)
        return name
    except asyncio.CancelledError:
        seen.append(f"cancel {name}")
        raise

def tasks(prefix):
    made = []
    for number in range(8):
        mess()
        made.append(asyncio.create_task(step(f"{prefix}{number}", 1 + number * 5 % 3)))
    return made

async def main():
    pending = tasks("w")
    while pending:
        done, pending = await wait(pending, return_when=asyncio.FIRST_COMPLETED)
        seen.append([task.result() for task in done])
        for task in done:
            await step(f"after {task.result()}", 1)
    for each in as_completed(tasks("c")):
        seen.append(await each)
    async for task in as_completed([step(f"a{number}", 2 - number % 2) for number in range(6)]):
        seen.append(task.result())
    try:
        async with TaskGroup() as group:
            for number in range(8):
                mess()
                group.create_task(step(f"g{number}", 3 + number % 2, fails=number == 5))
                group.create_task(step(f"h{number}", 3, fails=number in (2, 6)))
    except* ValueError as failed:
        seen.append([str(error) for error in failed.exceptions])
    try:
        await wait_for(asyncio.gather(*tasks("t")), 1.5)
    except TimeoutError:
        seen.append("timed out")
"""

# What asyncio itself gives to those that compete, amid cancellations.
COMPETING = """
async def guarded_by(name, semaphore):
    try:
        async with semaphore:
            seen.append(f"in {name}")
            await asyncio.sleep(1)
    finally:
        seen.append(f"out {name}")

async def consume(name, queue):
    while (item := await queue.get()) is not None:
        seen.append(f"{name} got {item}")
        await asyncio.sleep(item % 2)
        queue.task_done()

async def take(name, condition, items):
    async with condition:
        await condition.wait_for(lambda: items)
        seen.append(f"{name} takes {items.pop(0)}")

async def meet(name, barrier):
    await barrier.wait()
    seen.append(f"{name} passes")

async def main():
    for semaphore in (asyncio.Semaphore(2), asyncio.Lock()):
        tasks = [asyncio.create_task(guarded_by(name, semaphore)) for name in range(8)]
        await asyncio.sleep(0.5)
        tasks[3].cancel()
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    queue = asyncio.Queue(2)
    consumers = [asyncio.create_task(consume(name, queue)) for name in "abc"]
    for item in (*range(9), None, None, None):
        await queue.put(item)
        seen.append(f"put {item}")
    await asyncio.gather(*consumers)
    condition, items = asyncio.Condition(), []
    takers = [asyncio.create_task(take(name, condition, items)) for name in "abcd"]
    await asyncio.sleep(0)
    takers[1].cancel()
    for more in ([1, 2], [3]):
        async with condition:
            items.extend(more)
            condition.notify(2)
        await asyncio.sleep(1)
    await asyncio.gather(*takers, return_exceptions=True)
    barrier = asyncio.Barrier(3)
    await asyncio.gather(*(meet(name, barrier) for name in "abcdef"))
"""


def pythons() -> list[str]:
    """This Python, and the newer ones of this machine: of the path, and installed beside this one."""
    found = {sys.version_info[:2]: sys.executable}
    beside = Path(sys.base_prefix).parent.glob("*/bin/python3")
    for candidate in [*(shutil.which(f"python3.{minor}") for minor in range(12, 20)), *map(str, sorted(beside))]:
        if candidate is not None:
            asked = [candidate, "-c", "import sys; print(*sys.version_info[:2])"]
            ended = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
            # A launcher may be there for a version that is not.
            if ended.returncode == 0 and (version := tuple(map(int, ended.stdout.split()))) > (3, 11):
                found.setdefault((version[0], version[1]), candidate)
    return list(found.values())


@pytest.mark.parametrize(
    ("program", "tells"), [(WAITING, "cancel g7"), (COMPETING, "f passes")], ids=["ours", "asyncios"]
)
def test_the_order_is_the_same_in_every_process_and_version_of_python(program: str, tells: str) -> None:
    package = Path(fencepost.__file__).parents[1]
    # The package's own __init__ needs what only this interpreter has installed; its deterministic half needs nothing.
    alone = (
        "import sys, types; package = types.ModuleType('fencepost'); "
        f"package.__path__ = [{str(package / 'fencepost')!r}]; sys.modules['fencepost'] = package\n"
    )
    orders = set()
    for python in pythons():
        for seed in SEEDS:
            ended = subprocess.run(
                [python, "-c", alone + BEFORE + program + AFTER],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            orders.add(ended.stdout)
    assert len(orders) == 1
    assert tells in orders.pop()
