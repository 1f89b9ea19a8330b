"""What an event loop offers of the outside world, refused: a replay could not give it again.

The names are listed for type checkers; what later versions of Python add to loops is refused by the loop at the end.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from fencepost.deterministic.refusals import refuse


def _refused(name: str, instead: str = "do I/O in a step, with ctx.run(...)") -> Any:
    def method(_loop: object, *_args: object, **_kwargs: object) -> NoReturn:
        refuse(f"loop.{name}", instead)

    method.__name__ = name
    method.__qualname__ = f"NoOutside.{name}"
    method.__doc__ = "Raises NonDeterministic at the call."
    return method


_RUN_BY_WORKER = "the worker runs the loop; await what you need"


class NoOutside(asyncio.AbstractEventLoop):
    """An event loop without I/O, executors, processes and signals."""

    add_reader = _refused("add_reader")
    add_signal_handler = _refused("add_signal_handler")
    add_writer = _refused("add_writer")
    connect_accepted_socket = _refused("connect_accepted_socket")
    connect_read_pipe = _refused("connect_read_pipe")
    connect_write_pipe = _refused("connect_write_pipe")
    create_connection = _refused("create_connection")
    create_datagram_endpoint = _refused("create_datagram_endpoint")
    create_server = _refused("create_server")
    create_unix_connection = _refused("create_unix_connection")
    create_unix_server = _refused("create_unix_server")
    getaddrinfo = _refused("getaddrinfo")
    getnameinfo = _refused("getnameinfo")
    remove_reader = _refused("remove_reader")
    remove_signal_handler = _refused("remove_signal_handler")
    remove_writer = _refused("remove_writer")
    run_forever = _refused("run_forever", _RUN_BY_WORKER)
    run_in_executor = _refused("run_in_executor", "run blocking code as a step, with ctx.run(...)")
    run_until_complete = _refused("run_until_complete", _RUN_BY_WORKER)
    sendfile = _refused("sendfile")
    set_default_executor = _refused("set_default_executor", "run blocking code as a step, with ctx.run(...)")
    sock_accept = _refused("sock_accept")
    sock_connect = _refused("sock_connect")
    sock_recv = _refused("sock_recv")
    sock_recv_into = _refused("sock_recv_into")
    sock_recvfrom = _refused("sock_recvfrom")
    sock_recvfrom_into = _refused("sock_recvfrom_into")
    sock_sendall = _refused("sock_sendall")
    sock_sendfile = _refused("sock_sendfile")
    sock_sendto = _refused("sock_sendto")
    start_tls = _refused("start_tls")
    stop = _refused("stop", _RUN_BY_WORKER)
    subprocess_exec = _refused("subprocess_exec")
    subprocess_shell = _refused("subprocess_shell")


# The loop itself overrides what it has.
for _name in set(dir(asyncio.AbstractEventLoop)) - set(vars(NoOutside)):
    if not _name.startswith("_"):
        setattr(NoOutside, _name, _refused(_name))
