"""A process that a supervisor may start instead of a server: it says that it serves, or ends, as a folder says.

``child_program.py FOLDER``: if the folder has a file named as the process, it ends with the code that stands in it.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path


def main() -> None:
    """Read what the parent says, and do it."""
    number = json.loads(sys.stdin.readline())["process"]
    code = Path(sys.argv[1], str(number))
    if code.exists():
        sys.exit(int(code.read_text()))
    sys.stdout.write(json.dumps({"http_port": 1}) + "\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    # Not to be ended by it before it is waited for.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
