"""Makes a Python process believe in another time: CLOCK_OFFSETS has seconds to add to the clock, one after the other,
each for as long as CLOCK_STEP says. Python runs this at its start where the folder is on its path.

The monotonic clock is left alone, as an administrator who sets the time leaves it. So is what gRPC asks: it hands
deadlines over to its own code, which has the machine's clock, and a machine with a wrong clock has one, not two.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
import time
from typing import Any

_OFFSETS = [float(offset) for offset in os.environ.get("CLOCK_OFFSETS", "0").split(",")]
_STEP = float(os.environ.get("CLOCK_STEP", "1"))
_time, _monotonic, _datetime = time.time, time.monotonic, dt.datetime


def shifted() -> float:
    """The time, as far as this process knows."""
    if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc"):
        return _time()
    return _time() + _OFFSETS[int(_monotonic() / _STEP) % len(_OFFSETS)]


class _Meta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _datetime)


class Shifted(dt.datetime, metaclass=_Meta):
    """A datetime whose ``now`` is shifted; what others have made counts as one too."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        """The shifted time."""
        return _datetime.fromtimestamp(shifted(), tz)


time.time = shifted
time.time_ns = lambda: int(shifted() * 1e9)
dt.datetime = Shifted  # type: ignore[misc]  # a class in place of another is the point of it
