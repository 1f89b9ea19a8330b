"""One of the server processes of `fencepost serve --processes N`; its parent starts it and tells it what it is."""

from __future__ import annotations

import sys

from fencepost_server.cli.faults import explain
from fencepost_server.cli.loop import quiet_grpc, run_loop


def main() -> None:
    """Serve as the line on standard input says, and tell on standard output when it does."""
    quiet_grpc()
    from fencepost_server import app
    from fencepost_server.logs import set_up_logging, tell_program_ports
    from fencepost_server.supervisor import AT_ONCE, Assignment

    def announced(server: app.Running) -> None:
        tell_program_ports(server.grpc.port, server.http.port)

    assignment = Assignment.load(sys.stdin.buffer.readline())
    set_up_logging(assignment.config, assignment.process)
    try:
        run_loop(app.serve(assignment.config, shared_port=True, at_once=AT_ONCE, announced=announced))
    except Exception as error:
        fault = explain(error)
        if fault is None:
            raise
        sys.stderr.write(f"fencepost: process {assignment.process}: {fault}\n")
        sys.exit(fault.code)


if __name__ == "__main__":
    main()
