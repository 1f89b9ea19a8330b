"""Every setting and limit of a server, in one frozen value.

A setting comes from a flag of the command line, else from the environment variable FENCEPOST_<NAME>, else from
the default below. Times are in seconds, sizes in bytes. ``load`` reports all faults at once.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENV_PREFIX = "FENCEPOST_"


class ConfigError(ValueError):
    """One or more settings are wrong. ``faults`` has a sentence for each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def _setting(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, secret: bool = False
) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one server process. Field metadata holds the documentation and the range of each."""

    # Where
    dsn: str = _setting(
        "", "Postgres connection string, of several hosts perhaps; a pooler in transaction mode is fine.", secret=True
    )
    listen_dsn: str = _setting(
        "", "Direct connection string for LISTEN (not through a pooler). Empty: no LISTEN, polling only.", secret=True
    )
    grpc_host: str = _setting("127.0.0.1", "Address that gRPC binds to.")
    grpc_port: int = _setting(7654, "Port of gRPC; 0 takes a free one.", low=0, high=65535)
    http_host: str = _setting("127.0.0.1", "Address that HTTP (health, metrics) binds to.")
    http_port: int = _setting(7655, "Port of HTTP; 0 takes a free one.", low=0, high=65535)
    insecure: bool = _setting(
        False, "Bind to other addresses than loopback although there is no TLS and there are no keys."
    )
    processes: int = _setting(1, "Server processes that share the gRPC port; more than one need Linux.", low=1, high=64)
    log_format: str = _setting("text", "text or json.")
    log_level: str = _setting("info", "debug, info, warning or error.")

    # Database
    prepared: str = _setting("auto", "auto: prepare statements, unless a pooler in between mixes them up; off: never.")
    read_pool_size: int = _setting(4, "Connections for calls that read, and for registering.", low=1, high=100)
    loop_pool_size: int = _setting(
        4, "Connections for claims, heartbeats, sweeps and the other loops.", low=2, high=100
    )
    connect_timeout: float = _setting(5.0, "Opening a database connection.", low=1, high=60)
    lock_timeout: float = _setting(
        1.0, "Waiting for a row lock before the batch goes on without the row.", low=0.05, high=30
    )
    statement_timeout: float = _setting(5.0, "One SQL statement.", low=0.1, high=300)
    idle_in_transaction_timeout: float = _setting(
        5.0, "A transaction that its server has left alone.", low=0.5, high=300
    )
    batch_timeout: float = _setting(8.0, "One transaction; after it the socket is closed.", low=0.5, high=600)

    # Group commit
    lanes: int = _setting(2, "Transactions that write at the same time.", low=1, high=64)
    lane_batch: int = _setting(
        400, "Operations in one transaction, at most: if more than 64 are under way it takes half.", low=1, high=5000
    )
    lane_batch_bytes: int = _setting(16 << 20, "Payload bytes in one transaction.", low=1 << 20, high=256 << 20)
    lane_queue: int = _setting(
        20_000, "Operations that wait for one lane; more are refused as OVERLOADED.", low=10, high=1_000_000
    )
    operation_timeout: float = _setting(
        10.0, "How long an operation of a caller is tried while the database is away.", low=0.5, high=600
    )

    # Payloads and frames
    max_payload_bytes: int = _setting(1 << 20, "One payload.", low=1024, high=16 << 20)
    max_frame_bytes: int = _setting(
        3 << 20, "One frame of a session, and one message of a call.", low=64 << 10, high=64 << 20
    )
    max_frame_items: int = _setting(1000, "Items in one frame.", low=1, high=10_000)
    max_manifest_bytes: int = _setting(1 << 20, "One manifest.", low=1024, high=1 << 20)

    # Sessions
    max_sessions: int = _setting(2000, "Worker streams; more are refused as TOO_MANY_SESSIONS.", low=1, high=100_000)
    max_capacity: int = _setting(10_000, "Tasks at a time for one session.", low=1, high=100_000)
    max_concurrent_calls: int = _setting(
        10_000, "gRPC calls at a time, streams included; more are refused as OVERLOADED.", low=10, high=1_000_000
    )
    heartbeat_interval: float = _setting(20.0, "How often workers renew their leases.", low=0.1, high=600)
    ping_interval: float = _setting(
        5.0, "How often the server pings a session; three unanswered end it.", low=0.1, high=60
    )
    disconnect_grace: float = _setting(10.0, "How long leases outlive their stream.", low=0.1, high=600)
    hello_timeout: float = _setting(10.0, "From the opening of a stream to its Hello.", low=0.1, high=60)
    write_timeout: float = _setting(
        10.0, "A write to a session that its reader blocks; then the session ends.", low=0.1, high=60
    )
    outbox_bytes: int = _setting(
        32 << 20, "Bytes that wait to be written to one session; then it ends.", low=1 << 20, high=1 << 30
    )
    session_max_age: float = _setting(
        0.0, "Age at which a session is asked to reconnect, to spread load; 0: never.", low=0, high=604800
    )
    max_client_ops: int = _setting(
        20_000, "Items of one session that wait for their commit; then it is read no further.", low=1, high=1_000_000
    )
    max_client_bytes: int = _setting(64 << 20, "The same in bytes of their payloads.", low=1 << 20, high=1 << 34)

    # Dispatch
    eager_limit: int = _setting(16, "Tasks in a row that a slot gets without a claim.", low=0, high=10_000)
    claim_batch: int = _setting(500, "Tasks in one claim.", low=1, high=5000)
    claim_batch_bytes: int = _setting(
        16 << 20, "Bytes of inputs in one claim; one task at least.", low=1024, high=256 << 20
    )
    free_redeliveries: int = _setting(3, "Times that a task may come back without costing an attempt.", low=0, high=100)

    # Loops
    poll_interval: float = _setting(
        0.5, "How often the probe looks for work when nothing told of any.", low=0.05, high=60
    )
    notify_delay: float = _setting(0.01, "How long hints to other servers are gathered.", low=0, high=1)
    sweep_batch: int = _setting(250, "Leases expired in one go.", low=1, high=5000)
    outage_gap: float = _setting(
        5.0, "A gap between the probes of all servers that counts as an outage.", low=0.5, high=600
    )
    server_timeout: float = _setting(10.0, "A server that has not probed for so long counts as gone.", low=1, high=600)

    # Schedules
    schedule_batch: int = _setting(100, "Schedules that are fired in one go.", low=1, high=5000)
    schedule_retry: float = _setting(
        5.0, "How long the start of a schedule's run may take before another server tries it too.", low=0.1, high=600
    )
    schedule_look_interval: float = _setting(
        30.0, "How often at least a fire time that waits for a run looks whether it has ended.", low=1, high=3600
    )

    # Runs
    cancel_grace: float = _setting(
        30.0,
        "How long steps under way may go on when their run ends, before their leases are revoked.",
        low=0,
        high=86_400,
    )
    max_map_items: int = _setting(10_000, "Items of one map node.", low=1, high=100_000)
    max_pending_signals: int = _setting(
        10_000, "Signals that a run holds and no wait has taken.", low=1, high=1_000_000
    )
    max_history_events: int = _setting(
        50_000, "Events of a code run, from which on it is BLOCKED unless it ends or continues as new.", low=100,
        high=10_000_000,
    )  # fmt: skip
    timer_batch: int = _setting(500, "Timers fired in one go.", low=1, high=5000)
    outbox_batch: int = _setting(500, "Messages between runs delivered in one go.", low=1, high=5000)

    # Retention
    retention: float = _setting(
        30 * 86400.0,
        "How long ended runs are kept whose manifest does not say it; 0: for ever.",
        low=0,
        high=315_360_000,
    )
    retention_batch: int = _setting(200, "Ended runs deleted in one go.", low=1, high=5000)
    retention_batch_events: int = _setting(5000, "Events deleted in one go.", low=1, high=100_000)
    key_memory: float = _setting(
        30 * 86400.0,
        "How long a request key is known after its run was deleted.",
        low=60,
        high=315_360_000,
    )

    # Calls
    max_page_size: int = _setting(1000, "Rows on one page.", low=1, high=10_000)
    max_batch_starts: int = _setting(1000, "Runs in one BatchStartRuns.", low=1, high=10_000)
    max_wait: float = _setting(300.0, "One WaitRun.", low=1, high=3600)
    max_waiters: int = _setting(5000, "WaitRun and WatchRun calls at a time.", low=1, high=100_000)
    request_memory: float = _setting(86400.0, "How long a request_id is remembered.", low=60, high=31_536_000)
    shutdown_grace: float = _setting(30.0, "How long workers have to finish when the server stops.", low=0, high=3600)

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise ConfigError(faults)


_LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")


def address_of(host: str, port: int) -> str:
    """host:port, an address of IPv6 in brackets, with which it may be set or without."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _faults(config: Config) -> list[str]:
    faults = []
    for f in dataclasses.fields(config):
        value, low, high = getattr(config, f.name), f.metadata["low"], f.metadata["high"]
        if low is None:
            continue
        if not math.isfinite(value) or not low <= value <= high:
            faults.append(f"{f.name}: {value} is not between {low} and {high}")
    for name, choices in (
        ("log_format", ("text", "json")),
        ("log_level", ("debug", "info", "warning", "error")),
        ("prepared", ("auto", "off")),
    ):
        if getattr(config, name) not in choices:
            faults.append(f"{name}: {getattr(config, name)!r} is none of {', '.join(choices)}")
    if config.max_frame_bytes < config.max_payload_bytes * 1.25:
        faults.append("max_frame_bytes: must be at least 1.25 × max_payload_bytes")
    if config.outage_gap < 2 * config.poll_interval:
        # Else each probe would find an outage behind it, and no lease would ever run out.
        faults.append("outage_gap: must be at least 2 × poll_interval")
    if not config.insecure:
        faults.extend(
            f"{name}: {getattr(config, name)!r} is not loopback; to bind to it without TLS and keys, say --insecure "
            f"or {ENV_PREFIX}INSECURE=true"
            for name in ("grpc_host", "http_host")
            if getattr(config, name) not in _LOOPBACK
        )
    return faults


def load(overrides: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Config:
    """Build the Config from ``overrides`` (None values are ignored) over ``env`` (default: os.environ) over defaults.

    Raises ConfigError with every fault: a value of the wrong type or range, an unknown FENCEPOST_ variable or setting.
    """
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    faults: list[str] = []
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for key, text in env.items():
        name = key.removeprefix(ENV_PREFIX).lower()
        if not key.startswith(ENV_PREFIX) or name in _FOREIGN_ENV:
            continue
        if name not in fields:
            faults.append(f"{key}: no such setting")
            continue
        try:
            values[name] = _convert(fields[name].default, text)
        except ValueError as error:
            faults.append(f"{key}: {error}")
    for name, value in (overrides or {}).items():
        if name not in fields:
            faults.append(f"{name}: no such setting")
        elif value is not None:
            kind = type(fields[name].default)
            if _is_a(value, kind):
                values[name] = value
            else:
                faults.append(f"{name}: {value!r} is not {_KINDS[kind]}")
    try:
        config = Config(**values)
    except ConfigError as error:
        raise ConfigError(faults + error.faults) from None
    if faults:
        raise ConfigError(faults)
    return config


# Variables with the prefix that belong to the command line's client side and to tests, not to a server.
_FOREIGN_ENV = frozenset({"address", "namespace", "test_dsn"})


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _is_a(value: object, kind: type) -> bool:
    """Whether a value is one for settings of a kind. True and False, which Python takes for numbers, are none."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) or (kind is float and isinstance(value, int))


def _convert(default: Any, text: str) -> Any:
    if isinstance(default, bool):
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off", ""):
            return False
        raise ValueError(f"{text!r} is neither true nor false")
    kind = type(default)
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {_KINDS[kind]}") from None
