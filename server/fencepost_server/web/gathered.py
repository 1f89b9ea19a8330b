"""What several server processes tell, as one: ready if any is, and the metrics of all with the label ``process``.

Each process tells its own on a port of its own on loopback, from where it is fetched when somebody asks.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import h11
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

log = logging.getLogger("fencepost")

_TIMEOUT = 2.0
"""Seconds that one process has for all of its answer."""
_MAX_BYTES = 4 << 20
"""Of a body. A longer one is left out, for a part of it would end amid a line."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process as its parent sees it. ``http_port`` is None while it does not serve."""

    http_port: int | None
    restarts: int


class ToldByProcesses:
    """What server processes tell. ``states`` gives them by number, now."""

    def __init__(self, states: Callable[[], Mapping[int, ProcessState]]) -> None:
        self._states = states

    async def ready(self) -> bool:
        """Whether any of them is: they share the port, and connections go to those that listen. Waits for no more of
        them than it takes to know.
        """
        ports = self._ports(self._states()).values()
        asked = [asyncio.create_task(_get(port, "/readyz")) for port in ports]
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is not None and found[0] == http.client.OK:
                    return True
            return False
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def metrics(self) -> bytes:
        """Those of each that answers, and which of them are up."""
        states = self._states()
        ports = self._ports(states)
        answers = await asyncio.gather(*(_get(port, "/metrics") for port in ports.values()))
        texts = {
            number: answer[1].decode()
            for number, answer in zip(ports, answers, strict=True)
            if answer is not None and answer[0] == http.client.OK
        }
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Gathered(states, texts))
        return generate_latest(registry)

    def _ports(self, states: Mapping[int, ProcessState]) -> dict[int, int]:
        return {number: state.http_port for number, state in states.items() if state.http_port is not None}


async def _get(port: int, path: str) -> tuple[int, bytes] | None:
    """Status and body; None if they are not all there in time, or are more than they may be."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return await _exchange(reader, writer, path)
            finally:
                writer.transport.abort()  # without waiting for anything: one that hangs would not say goodbye
    except (OSError, TimeoutError, h11.ProtocolError):
        return None  # it has just ended, or hangs


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> tuple[int, bytes] | None:
    connection = h11.Connection(h11.CLIENT)
    headers = [("Host", "127.0.0.1"), ("Connection", "close")]
    for sent in (h11.Request(method="GET", target=path, headers=headers), h11.EndOfMessage()):
        writer.write(connection.send(sent) or b"")
    status, body = 0, bytearray()
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > _MAX_BYTES:
                log.warning("a process tells more than %d bytes at %s: it is left out", _MAX_BYTES, path)
                return None
    return status, bytes(body)


class _Gathered(Collector):
    def __init__(self, states: Mapping[int, ProcessState], texts: Mapping[int, str]) -> None:
        self._states = states
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        """A metric of all processes is one, with a sample for each of them."""
        up = GaugeMetricFamily("fencepost_process_up", "1 if a server process serves.", labels=["process"])
        restarts = CounterMetricFamily(
            "fencepost_process_restarts", "Times that a server process was started again.", labels=["process"]
        )
        for number, state in self._states.items():
            up.add_metric([str(number)], float(state.http_port is not None))
            restarts.add_metric([str(number)], state.restarts)
        yield up
        yield restarts
        found: dict[str, Metric] = {}
        for number, text in self._texts.items():
            for metric in text_string_to_metric_families(text):
                merged = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    merged.add_sample(sample.name, {**sample.labels, "process": str(number)}, sample.value)
        yield from found.values()
