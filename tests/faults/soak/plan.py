"""Which fault comes when: drawn from the seed before anything happens, so that a seed repeats it.

Kinds come as from a pack of cards, each once before any comes again. What ends a server's process hits the first
server in the first half of the time and the second one in the second half: so each lives through half of it, long
enough to tell whether its memory and descriptors stay level.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.faults.soak.faults import ENDS_ITS_SERVER, KINDS, Fault, touched
from tests.faults.soak.stage import SERVERS


def faults(seed: int, count: int, workers: int, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Fault]:
    """So many faults, in order."""
    rng = Random(f"faults {seed}")
    found = []
    for number, kind in zip(range(count), _dealt(rng, kinds), strict=False):
        target = rng.randrange(SERVERS)
        if kind in ENDS_ITS_SERVER:
            target = 0 if number < count / 2 else 1
        elif kind.endswith("client link"):
            target = -1
        elif "worker" in kind:
            target = rng.randrange(workers)
        found.append(Fault(kind, target, rng.randrange(1 << 32), touched(kind, target)))
    return found


def _dealt(rng: Random, kinds: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from rng.sample(kinds, len(kinds))
