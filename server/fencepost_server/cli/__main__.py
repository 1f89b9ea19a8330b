"""`python -m fencepost_server.cli`."""

from __future__ import annotations

from fencepost_server.cli import main

if __name__ == "__main__":
    main()
