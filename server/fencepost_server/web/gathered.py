"""What several server processes tell, as one: ready if any is, and the metrics of all with the label ``process``.

Each process tells its own on a port of its own on loopback, from where it is fetched when somebody asks.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_TIMEOUT = 2.0
_MAX_BYTES = 4 << 20


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
        """Whether any of them is: they share the port, and connections go to those that listen."""
        answers = await self._ask("/readyz", self._states())
        return any(status == http.client.OK for status, _ in answers.values())

    async def metrics(self) -> bytes:
        """Those of each that answers, and which of them are up."""
        states = self._states()
        answers = await self._ask("/metrics", states)
        texts = {number: body.decode() for number, (status, body) in answers.items() if status == http.client.OK}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Gathered(states, texts))
        return generate_latest(registry)

    async def _ask(self, path: str, states: Mapping[int, ProcessState]) -> dict[int, tuple[int, bytes]]:
        """Status and body by process; those that do not answer in time are left out."""
        ports = {number: state.http_port for number, state in states.items() if state.http_port is not None}
        asked = (asyncio.to_thread(_get, port, path) for port in ports.values())
        answers = await asyncio.gather(*asked)
        return {number: answer for number, answer in zip(ports, answers, strict=True) if answer is not None}


def _get(port: int, path: str) -> tuple[int, bytes] | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(_MAX_BYTES)
    except (OSError, http.client.HTTPException):
        return None  # it has just ended, or hangs
    finally:
        connection.close()


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
