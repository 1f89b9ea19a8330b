"""Settings come from flags, else the environment, else their defaults; all faults are told at once."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from fencepost_server.config import ENV_PREFIX, Config, ConfigError, load


def test_a_flag_goes_before_the_environment_and_that_before_the_default() -> None:
    env = {"FENCEPOST_LANES": "3", "FENCEPOST_GRPC_PORT": "1", "FENCEPOST_INSECURE": "yes", "OTHER": "x"}
    config = load({"grpc_port": 2, "http_port": None}, env)
    assert (config.lanes, config.grpc_port, config.insecure) == (3, 2, True)
    assert config.http_port == Config().http_port
    assert load({}, {}) == Config()


def test_all_faults_are_told_at_once() -> None:
    env = {
        "FENCEPOST_LANES": "many",
        "FENCEPOST_NO_SUCH_THING": "1",
        "FENCEPOST_INSECURE": "perhaps",
        "FENCEPOST_PING_INTERVAL": "nan",
        "FENCEPOST_LOG_LEVEL": "loud",
    }
    with pytest.raises(ConfigError) as failure:
        load({"grpc_port": 70_000}, env)
    assert len(failure.value.faults) == 6
    for word in ("LANES", "NO_SUCH_THING", "INSECURE", "ping_interval", "log_level", "grpc_port"):
        assert any(word in fault for fault in failure.value.faults), word


def test_values_of_another_kind_are_faults_like_others() -> None:
    wrong = {"lanes": 2.5, "retention": timedelta(days=7), "insecure": "no", "grpc_port": True, "grpc_host": 5, "no": 1}
    with pytest.raises(ConfigError) as failure:
        load({**wrong, "max_wait": 5, "read_pool_size": 0}, {"FENCEPOST_LANE_BATCH": "many"})
    assert failure.value.faults == [
        "FENCEPOST_LANE_BATCH: 'many' is not a whole number",
        "lanes: 2.5 is not a whole number",
        "retention: datetime.timedelta(days=7) is not a number",
        "insecure: 'no' is not true or false",
        "grpc_port: True is not a whole number",
        "grpc_host: 5 is not text",
        "no: no such setting",
        "read_pool_size: 0 is not between 1 and 100",
    ]


def numbers() -> list[tuple[str, Any, Any]]:
    """Every setting with a range."""
    fields = dataclasses.fields(Config)
    return [(f.name, f.metadata["low"], f.metadata["high"]) for f in fields if f.metadata["low"] is not None]


@pytest.mark.parametrize(("name", "low", "high"), numbers())
def test_every_number_has_a_range_that_its_default_lies_in_and_that_is_kept(name: str, low: Any, high: Any) -> None:
    """I12."""
    assert low <= getattr(Config(), name) <= high
    for wrong in (low - 1, high * 2 + 1, float("nan"), float("inf")):
        setting: dict[str, Any] = {name: wrong}
        with pytest.raises(ConfigError) as failure:
            Config(**setting)
        assert any(fault.startswith(f"{name}:") for fault in failure.value.faults)


def test_every_setting_that_is_a_number_has_a_range() -> None:
    """I12: everything has a limit."""
    fields = dataclasses.fields(Config)
    assert [f.name for f in fields if isinstance(f.default, int | float) and f.metadata["low"] is None] == ["insecure"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_other_addresses_than_loopback_are_bound_only_when_it_is_said_aloud(host: str) -> None:
    for name in ("grpc_host", "http_host"):
        setting: dict[str, Any] = {name: host}
        with pytest.raises(ConfigError, match="say --insecure or FENCEPOST_INSECURE=true"):
            Config(**setting)
        assert getattr(Config(**setting, insecure=True), name) == host


def test_settings_that_cannot_work_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_frame_bytes"):
        Config(max_payload_bytes=3 << 20)
    with pytest.raises(ConfigError, match="outage_gap"):
        Config(poll_interval=10)


def test_the_connection_strings_are_marked_as_secrets() -> None:
    secret = {f.name for f in dataclasses.fields(Config) if f.metadata["secret"]}
    assert secret == {"dsn", "listen_dsn"}
    assert all((ENV_PREFIX + f.name.upper()).isupper() for f in dataclasses.fields(Config))
