"""A process that a supervisor may start instead of a server: it says that it serves, or does as a folder says.

``child_program.py FOLDER``: if the folder has a file named as the process, it ends with the code that stands in it.
Words instead of a code: "hang" does not come to serve, "babble" says something else, and "linger" serves and notes
each SIGTERM in the file ``<number>.signals`` until SIGWINCH ends it.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path


def main() -> None:
    """Read what the parent says, and do it."""
    signal.alarm(120)  # none is left of a test that fails
    number = json.loads(sys.stdin.readline())["process"]
    told = Path(sys.argv[1], str(number))
    word = told.read_text() if told.exists() else ""
    if word.isdigit():
        sys.exit(int(word))
    if word == "hang":
        signal.sigwait({signal.SIGTERM})
    print("ready!" if word == "babble" else json.dumps({"http_port": 1}), flush=True)  # noqa: T201  # for the parent
    if word == "linger":
        while signal.sigwait({signal.SIGTERM, signal.SIGWINCH}) == signal.SIGTERM:
            with Path(sys.argv[1], f"{number}.signals").open("a") as signals:
                signals.write("SIGTERM\n")
    else:
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    # Not to be ended by them before they are waited for.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGWINCH})
    main()
