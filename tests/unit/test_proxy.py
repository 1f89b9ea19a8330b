"""The proxy that other tests break connections with does what it says, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fixtures.proxy import CHUNK, Proxy
from tests.fixtures.waiting import wait_until

LIMIT = 30.0
SHORT = 0.15


class Echo:
    """A server that sends back what it gets, and counts it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.connections: list[socket.socket] = []
        self.received = b""
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(LIMIT)
            self.connections.append(connection)
            thread = threading.Thread(target=self._serve, args=[connection], daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(1 << 16):
                self.received += data
                connection.sendall(data)
        except OSError:
            pass
        finally:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in [self._acceptor, *self._threads]:
            thread.join(LIMIT)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo, new_proxy: Callable[[str], Proxy]) -> Proxy:
    return new_proxy(echo.address)


@pytest.fixture
def connect(proxy: Proxy) -> Iterator[Callable[[], socket.socket]]:
    clients: list[socket.socket] = []

    def open_one() -> socket.socket:
        client = socket.create_connection(("127.0.0.1", proxy.port), timeout=LIMIT)
        clients.append(client)
        return client

    yield open_one
    for client in clients:
        client.close()


def read_exactly(client: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = client.recv(n - len(data))
        assert part, f"the connection ended after {data!r}"
        data += part
    return data


def says(client: socket.socket, data: bytes) -> bytes:
    """Send ``data`` and return the echo."""
    client.sendall(data)
    return read_exactly(client, len(data))


def is_silent(client: socket.socket) -> bool:
    """Nothing arrives for a short while, not even an end."""
    client.settimeout(SHORT)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(LIMIT)
    return False


def test_bytes_pass_unchanged_and_in_order_both_ways(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    data = bytes(range(256)) * 4096
    with ThreadPoolExecutor(1) as reader:
        echoed = reader.submit(read_exactly, client, len(data))
        client.sendall(data)
        assert echoed.result(LIMIT) == data
    assert proxy.carried("up") == proxy.carried("down") == len(data)


def test_an_end_passes_and_closes_both_sides(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    assert says(client, b"x") == b"x"
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    wait_until(lambda: proxy.connections == 0)


def test_a_cut_ends_every_connection_and_new_ones_work(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    clients = [connect() for _ in range(3)]
    assert [says(client, b"x") for client in clients] == [b"x"] * 3
    proxy.cut()
    assert proxy.connections == 0
    assert [client.recv(1) for client in clients] == [b""] * 3
    assert says(connect(), b"again") == b"again"


def test_a_reset_is_seen_as_a_reset_by_both_ends(
    proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    assert says(client, b"x") == b"x"
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    wait_until(lambda: bool(echo.connections) and echo.connections[0].fileno() < 0)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_black_hole_one_way_lets_the_other_way_through(
    proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket], direction: str
) -> None:
    client = connect()
    assert says(client, b"a") == b"a"
    proxy.blackhole("up" if direction == "up" else "down")
    client.sendall(b"b")
    if direction == "up":
        echo.connections[0].sendall(b"from the server")
        assert read_exactly(client, 15) == b"from the server"
        assert echo.received == b"a"
    else:
        wait_until(lambda: echo.received == b"ab")
    assert is_silent(client)
    proxy.heal()
    assert read_exactly(client, 1) == b"b"


def test_a_black_hole_hides_that_the_other_end_has_gone(
    proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    assert says(client, b"a") == b"a"
    proxy.blackhole()
    echo.connections[0].shutdown(socket.SHUT_RDWR)
    assert is_silent(client)
    proxy.heal()
    assert client.recv(1) == b""


def test_a_connection_made_during_a_black_hole_gets_through_when_it_is_healed(
    proxy: Proxy, connect: Callable[[], socket.socket]
) -> None:
    proxy.blackhole()
    client = connect()
    client.sendall(b"late")
    assert is_silent(client)
    proxy.heal()
    assert read_exactly(client, 4) == b"late"


def test_a_delay_is_latency_and_not_a_limit_of_throughput(proxy: Proxy, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    assert says(client, b"x") == b"x"
    data = bytes(60 * CHUNK)
    proxy.delay(0.3, "up")
    began = time.monotonic()
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(client.sendall, data)
        assert read_exactly(client, len(data)) == data
        sent.result(LIMIT)
    assert 0.3 <= time.monotonic() - began < 60 * 0.3  # one after the other they take so long at least


def test_a_throttled_connection_carries_so_many_bytes_a_second(
    proxy: Proxy, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    proxy.throttle(50_000, "up")
    began = time.monotonic()
    assert says(client, bytes(15_000)) == bytes(15_000)
    assert time.monotonic() - began >= 0.25


def test_a_break_comes_after_exactly_so_many_bytes(
    proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    assert says(client, b"12345") == b"12345"
    proxy.break_after(3, "up")
    client.sendall(b"67890")
    with pytest.raises(ConnectionResetError):
        read_exactly(client, 5)
    wait_until(lambda: bool(echo.connections) and echo.connections[0].fileno() < 0)
    assert echo.received == b"12345678"
    assert proxy.breaks == 1
    assert says(connect(), b"once only") == b"once only"


@pytest.mark.parametrize("forward", [False, True])
def test_a_break_on_a_pattern_comes_before_or_after_it(
    proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket], forward: bool
) -> None:
    client = connect()
    proxy.break_on(b"COMMIT", "up", "cut", forward=forward)
    client.sendall(b"insert; COMMIT; more")
    while client.recv(100):
        pass
    wait_until(lambda: bool(echo.connections) and echo.connections[0].fileno() < 0)
    assert echo.received == (b"insert; COMMIT; more" if forward else b"insert; ")


def test_a_pattern_is_found_over_two_chunks(proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    proxy.break_on(b"COMMIT", "up", "cut", forward=True)
    assert says(client, b"say COM") == b"say COM"
    client.sendall(b"MIT; more")
    while client.recv(100):
        pass
    wait_until(lambda: bool(echo.connections) and echo.connections[0].fileno() < 0)
    assert echo.received == b"say COMMIT; more"


def test_a_pattern_can_wait_for_another_one_of_its_own_connection(
    proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket]
) -> None:
    client, other = connect(), connect()
    proxy.break_on(b"COMMIT", "up", "cut", after=b"insert")
    assert says(client, b"COMMIT; ins") == b"COMMIT; ins"
    assert says(other, b"ert; COMMIT; ") == b"ert; COMMIT; "
    client.sendall(b"ert; COM")
    assert read_exactly(client, 8) == b"ert; COM"
    client.sendall(b"MIT; more")
    while client.recv(100):
        pass
    wait_until(lambda: proxy.breaks == 1)


def test_a_pattern_can_open_a_black_hole(proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    proxy.break_on(b"B", "up", "blackhole")
    client.sendall(b"aBc")
    wait_until(lambda: echo.received == b"a")
    assert is_silent(client)
    assert echo.received == b"a"
    proxy.heal()
    assert read_exactly(client, 3) == b"aBc"


def test_refused_connections_leave_the_others_and_heal_brings_back_the_port(
    proxy: Proxy, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    assert says(client, b"x") == b"x"
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect()
    assert says(client, b"y") == b"y"
    proxy.heal()
    assert says(connect(), b"z") == b"z"


def test_a_retargeted_proxy_sends_new_connections_elsewhere(
    proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket]
) -> None:
    old = connect()
    assert says(old, b"x") == b"x"
    other = Echo()
    try:
        proxy.retarget(other.address)
        assert says(connect(), b"y") == b"y"
        assert says(old, b"z") == b"z"
        assert (echo.received, other.received) == (b"xz", b"y")
    finally:
        proxy.cut()
        other.close()


def test_a_target_that_is_away_resets_the_client(
    proxy: Proxy, echo: Echo, connect: Callable[[], socket.socket]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    proxy.retarget(f"127.0.0.1:{port}")
    with pytest.raises(ConnectionResetError):
        connect().recv(1)
    proxy.retarget(echo.address)
    assert says(connect(), b"back") == b"back"


def test_a_stopped_proxy_leaves_no_thread_and_no_connection(echo: Echo) -> None:
    threads = threading.active_count()
    with Proxy(echo.address) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port), timeout=LIMIT)
        assert says(client, b"x") == b"x"
    with client, pytest.raises(ConnectionResetError):
        client.recv(1)
    wait_until(lambda: threading.active_count() <= threads)
