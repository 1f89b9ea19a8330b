"""Whether the servers' memory and open files stay level, seen every few seconds over each server's life."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import psutil

from tests.faults.soak.stage import Stage
from tests.fixtures.waiting import paced

EVERY = 2.0
LONG_ENOUGH = 120.0
"""Of a shorter life nothing can be said: caches fill."""
MORE_MEMORY = 40 << 20
MORE_FILES = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes of memory and open file descriptors of a server at a time."""

    at: float
    memory: int
    files: int


@dataclass(frozen=True, slots=True)
class Level:
    """One life of a server: between its second and its last quarter."""

    server: int
    seconds: float
    memory: tuple[int, int]
    files: tuple[int, int]

    @property
    def grown(self) -> bool:
        """Whether it needs more than it did, by more than comes and goes."""
        (before, after), (fewer, more) = self.memory, self.files
        return after > before * 1.25 + MORE_MEMORY or more > fewer + MORE_FILES


class Levels:
    """Takes samples for as long as it is let."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._lives: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)

    async def watch(self) -> None:
        """Look every few seconds; runs until it is cancelled."""
        while True:
            for number, process in enumerate(self._stage.servers):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.running:
                        found = psutil.Process(process.pid)
                        sample = Sample(time.monotonic(), found.memory_info().rss, found.num_fds())
                        self._lives[number, process.pid].append(sample)
            await paced(EVERY)

    def found(self) -> list[Level]:
        """Of each life that was long enough to tell."""
        return [
            _level(number, samples)
            for (number, _), samples in self._lives.items()
            if samples[-1].at - samples[0].at >= LONG_ENOUGH
        ]


def _level(number: int, samples: list[Sample]) -> Level:
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return Level(
        number,
        samples[-1].at - samples[0].at,
        (int(statistics.median(s.memory for s in early)), int(statistics.median(s.memory for s in late))),
        (int(statistics.median(s.files for s in early)), int(statistics.median(s.files for s in late))),
    )
