"""Interrupts turns of workflows that do not end: `while True: pass` in one of them must not stop the others.

A turn is the time from an event until the workflow's function waits again; it has nothing to wait for, so one that
lasts for seconds is stuck. Another thread (the session's) raises `TurnInterrupted` in the thread of the turns, and
again each second until the turn ends: code may catch it. What can't be interrupted so is code in C. Seconds in which
the process does not run at all (it was stopped, or the machine had no processor for it) are nobody's fault.

The one who ends a turn and the one who interrupts it use a lock, so that nothing but a turn is ever interrupted.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from threading import get_ident
from time import monotonic, process_time  # as they are before turns refuse them, without the question
from typing import ParamSpec, TypeVar

from fencepost.sdk_log import SdkLog

P = ParamSpec("P")
T = TypeVar("T")

logger = SdkLog("fencepost.worker")

REPLAYED_A_SECOND = 10_000
"""How many events of a history are granted a second of their own, over the limit of a turn."""
AGAIN_AFTER = 1.0
ALARM_AFTER = 10.0
STANDSTILL = 0.5
"""Nobody has looked for so many seconds, which happens a few times a second otherwise."""
STANDSTILLS = 20
"""How many a turn is granted: code in C that sleeps, and lets nobody else run meanwhile, looks the same."""

_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


class TurnInterrupted(BaseException):
    """A turn of a workflow took too long. Not to be caught by the workflow: it would only be raised again."""


class Watchdog:
    """Watches the turns in one thread. ``limit`` is how long one may take, in seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._began = 0.0
        self._thread = 0
        self._subject: object = ""
        self._extra = 0.0
        self._interrupts = 0
        self._alarms = 0
        # Of the last look: its time, and the processor time of the process; then when the turn under way began, how
        # often the process has stood still in it, and for how long.
        self._looked, self._ran = monotonic(), process_time()
        self._still = (0.0, 0, 0.0)

    # In the thread of the turns.

    def run(self, subject: object, extra: float, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Do ``work`` as one turn of ``subject``, whose text is for the log. It may take ``extra`` seconds more.

        Raises TurnInterrupted if it was interrupted, whatever came of that.
        """
        try:
            self._subject = subject
            self._extra = extra
            self._thread = get_ident()
            self._began = monotonic()
            try:
                return work(*args, **kwargs)
            finally:
                if self._end():
                    raise TurnInterrupted
        except TurnInterrupted:
            # It may also have come in the midst of the end.
            self._end()
            raise

    def drop(self, subject: object, evict: Callable[[], object]) -> None:
        """Let ``subject`` leave memory by ``evict``, which runs code of it: a turn, but one that raises nothing if it
        has to be interrupted.
        """
        try:
            self.run(subject, 0.0, evict)
        except TurnInterrupted:
            logger.exception("%s does not end when it is dropped", subject)

    def _end(self) -> bool:
        """The turn has ended; tells whether it was interrupted. May raise TurnInterrupted: then call it again."""
        interrupted = False
        while self._began:
            try:
                with self._lock:
                    if self._interrupts or self._alarms:
                        interrupted = interrupted or self._interrupts > 0
                        self._interrupts = self._alarms = 0
                    self._began = 0.0
            except TurnInterrupted:
                interrupted = True
        if interrupted:
            # One that is still to come would meet whatever runs next.
            _raise_in_thread(ctypes.c_ulong(self._thread), ctypes.py_object())
        return interrupted

    # In another thread.

    def check(self) -> None:
        """Interrupt the turn under way if it takes too long; to be called a few times a second."""
        began, now = self._began, monotonic()
        still = self._stood_still(began, now)
        if not began:
            return
        lasted = now - began - still
        if lasted < self.limit + self._extra + self._interrupts * AGAIN_AFTER:
            return
        with self._lock:
            if self._began != began:
                return
            self._interrupts += 1
            # Before the exception, after which the thread is elsewhere.
            where = self._where() if self._interrupts == 1 else ""
            _raise_in_thread(ctypes.c_ulong(self._thread), ctypes.py_object(TurnInterrupted))
        if self._interrupts == 1:
            logger.error(
                "%s does not come to a wait: its turn is interrupted after %.1f s, at\n%s",
                self._subject,
                lasted,
                where,
            )
        elif lasted >= ALARM_AFTER * (self._alarms + 1):
            self._alarms += 1
            logger.critical(
                "%s holds up every workflow of this worker for %.0f s and can't be interrupted, at\n%s",
                self._subject,
                lasted,
                self._where(),
            )

    def _stood_still(self, began: float, now: float) -> float:
        """For how many seconds of the turn under way the process did not run."""
        gap, ran = now - self._looked, process_time()
        if self._still[0] != began:
            self._still = (began, 0, 0.0)
        _, times, seconds = self._still
        if gap > STANDSTILL and times < STANDSTILLS:
            # Code in C that keeps everybody else waiting runs, and counts, as does what ran before and after the stop.
            stood = min(gap - (ran - self._ran), now - began)
            self._still = (began, times + 1, seconds + max(0.0, stood))
        self._looked, self._ran = now, ran
        return self._still[2]

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread)
        return "(it has just ended)" if frame is None else "".join(traceback.format_stack(frame)[-8:]).rstrip()
