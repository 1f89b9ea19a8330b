"""Shows how far the orders have come: bars on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINE_INTERVAL = 2.0


class Display:
    """A bar for each step on a terminal, and above them what has been said; elsewhere only lines."""

    def __init__(self, expected: Mapping[str, int], orders: int, last_steps: Sequence[str]) -> None:
        """``expected`` are the orders that each step has to do; one of ``last_steps`` is an order's last."""
        self._console = Console(highlight=False)
        self._orders = orders
        self._last_steps = last_steps
        self._started = time.monotonic()
        self._next_line = self._started + LINE_INTERVAL
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bars = {step: self._progress.add_task(step, total=total) for step, total in expected.items()}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line, with the seconds that have passed."""
        self._console.print(f"{time.monotonic() - self._started:6.1f} s  {text}", markup=False, soft_wrap=True)

    def show(self, effects: Mapping[str, int]) -> None:
        """Show how many orders each step is done with."""
        for step, bar in self._bars.items():
            self._progress.update(bar, completed=effects.get(step, 0))
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_INTERVAL
            done = sum(effects.get(step, 0) for step in self._last_steps)
            self.say(f"{done} of {self._orders} orders done, {sum(effects.values())} steps")
