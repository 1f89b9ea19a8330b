"""A system that has no thread left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def no_thread_starts() -> Iterator[None]:
    """No thread of this process can be started meanwhile.

    Only said so: where a start really fails, Python 3.11 keeps a state of the thread under the identity of the one that
    wanted it, to which nothing can be raised from then on (`PyThreadState_SetAsyncExc`): no turn is interrupted.
    """

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield
