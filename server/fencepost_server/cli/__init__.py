"""The command line `fencepost`.

`serve`, `dev`, `migrate` and `restore-epoch` work on a server or its database; `runs` and `definitions` are clients of
a running server, through the SDK. Nothing heavy is imported before the command that needs it: `--help` is quick.

Exit codes: 0 all went well, 1 a failure, 2 wrong usage or settings; `runs wait` has 3 and 4 as well. A fault that can
be expected is told on standard error in a line, never in a traceback; `--debug` shows that too.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what ``arguments`` (default: the process's own) say, and end the process with the exit code."""
    from fencepost_server.cli.program import run

    run(arguments)
