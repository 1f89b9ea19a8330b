"""A worker and one run over a folder: `python -m examples.documents --help`."""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.documents.workflow import STEPS, Folder, Report, documents
from examples.workers import worker_beside
from fencepost import Client

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    """Read a folder of Markdown and print the report."""
    parser = argparse.ArgumentParser(description="Read a folder of Markdown; needs a server (make dev).")
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS, help="by default this repository's docs")
    parser.add_argument("--address", default="127.0.0.1:7654", help="the server's gRPC, host:port")
    parser.add_argument("--at-a-time", type=int, default=4, help="how many pages are read at a time")
    options = parser.parse_args()
    folder = Folder(str(options.folder.resolve()), options.at_a_time)
    with worker_beside(options.address, [documents], STEPS), Client(options.address) as client:
        run = client.start_run("documents", folder)
        print(f"run {run.run_id}")
        found = run.result(type=Report)
    print(f"{found.pages} pages, {found.words} words, {found.blocks} blocks of code; the longest is {found.longest}")
    for link in found.broken_links:
        print(f"leads nowhere: {link}")


if __name__ == "__main__":
    main()
