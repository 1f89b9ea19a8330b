"""The same work under several circumstances, in turns: how fast each is, and how that compares with the first.

What drifts with the machine meets all alike: every round does all of them, each time beginning with another one, and
the ratio is that of one round. Speeds are over the first nine tenths of the steps, because some have no end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from benchmarks.load import Work
from benchmarks.results import Results

Circumstances = Mapping[str, Callable[[], Awaitable[Work]]]
"""By name, the plain one first; each does the work once."""


async def compare(results: Results, circumstances: Circumstances, number: int = 0) -> Mapping[str, Work]:
    """One round, the ``number``-th: adds `NAME_steps_per_second` of each, and `NAME_ratio` to the first."""
    names = list(circumstances)
    turn = number % len(names)
    done = {name: await circumstances[name]() for name in [*names[turn:], *names[:turn]]}
    plain = done[names[0]].steady_rate
    for name in names:
        results.add({f"{name}_steps_per_second": done[name].steady_rate})
        results.add_cost(name, done[name].cost, done[name].steps)
    results.add({f"{name}_ratio": done[name].steady_rate / plain for name in names[1:]})
    return done
