"""Starts a program that the kernel ends when the process that started it dies, however it dies.

`leashed` gives the command; its first words run this file in a bare interpreter, which takes the wanted user, asks for
the signal and then becomes the program: the pid stays, nothing remains in between. A hook between fork and exec would
be shorter, but may hang in a process that has threads. The signal comes when the *thread* that started the program
ends, so start programs from the main thread. Where the kernel has no such service (outside of Linux), the program is
merely started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def leashed(
    argv: Sequence[str], *, at_death: signal.Signals = signal.SIGKILL, user: tuple[int, int] | None = None
) -> list[str]:
    """The command that runs ``argv`` (an absolute path first) until the calling process dies.

    It gets the signal ``at_death`` then. ``user``: the (uid, gid) to run it as; None for the caller's own.
    """
    uid, gid = user or (-1, -1)
    words = (os.getpid(), int(at_death), uid, gid)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *map(str, words), *argv]


def _become(words: Sequence[str]) -> None:
    parent, at_death, uid, gid = map(int, words[:4])
    program = list(words[4:])
    if uid >= 0:
        # First, because the kernel drops the request for the signal when the user changes.
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, at_death, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:
            os._exit(1)  # it died before it was asked for
    # The interpreter ignores these two, and the program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execv(program[0], program)  # noqa: S606  # becoming the program is the purpose


if __name__ == "__main__":
    _become(sys.argv[1:])
