"""What a server process writes: log lines to standard error, and to standard output where it serves."""

from __future__ import annotations

import json
import logging
import os
import sys

from fencepost_server.config import Config, address_of


def tell_ports(config: Config, grpc_port: int, http_port: int) -> None:
    """Tell where there is a server: as a JSON line for programs, else as a sentence."""
    if config.log_format == "json":
        tell_program_ports(grpc_port, http_port)
    else:
        grpc_address, http_address = address_of(config.grpc_host, grpc_port), address_of(config.http_host, http_port)
        print(f"fencepost serves gRPC on {grpc_address}, HTTP on {http_address}", flush=True)  # noqa: T201  # for people


def tell_program_ports(grpc_port: int, http_port: int) -> None:
    """Tell it as a JSON line, whatever the format of the log."""
    line = {"event": "serving", "grpc_port": grpc_port, "http_port": http_port, "pid": os.getpid()}
    print(json.dumps(line), flush=True)  # noqa: T201  # stdout is what a supervisor reads


def set_up_logging(config: Config, process: int | None = None) -> None:
    """Log lines to standard error, as text or JSON. ``process``: which of several it is, for each line to tell."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(_JsonFormatter(process))
    else:
        which = "" if process is None else f"[process {process}] "
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {which}%(name)s: %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    # The driver and its pool have several lines for each connection that is lost or not had. Ours say it once a second.
    logging.getLogger("psycopg").setLevel(logging.ERROR)


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: int | None) -> None:
        super().__init__()
        self._which = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            **self._which,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
