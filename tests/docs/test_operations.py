"""What can be checked of the commands in docs/operations.md that need Docker, which a test machine has not."""

from __future__ import annotations

import re
import shlex

from ruamel.yaml import YAML

from fencepost_server.config import ENV_PREFIX, load
from tests.docs.pages import ROOT, blocks


def compose_commands() -> list[list[str]]:
    """The words of each `docker compose` command on the page."""
    text = "\n".join(block.text for block in blocks("docs/operations.md") if block.kind == "by")
    return [shlex.split(command) for command in re.findall(r"docker compose [^&\n]+", text)]


def test_the_compose_commands_name_services_that_exist() -> None:
    compose = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text("utf-8"))
    assert len(compose_commands()) == 3
    for _docker, _compose, verb, *words in compose_commands():
        assert verb in {"up", "run"}
        assert {word for word in words if not word.startswith("-")} <= compose["services"].keys()
    dockerfile = ROOT / compose["x-fencepost"]["build"]["dockerfile"]
    assert dockerfile.is_file()


def test_the_settings_of_the_containers_are_settings_of_the_server() -> None:
    compose = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text("utf-8"))
    environment = compose["services"]["server"]["environment"]
    given = {name: str(value) for name, value in environment.items() if "${" not in str(value)}
    assert load(env={f"{ENV_PREFIX}DSN": "postgresql://x", **given}).grpc_host == "0.0.0.0"
    image = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    load(env=dict(re.findall(rf"({ENV_PREFIX}[A-Z_]+)=(\S+)", image)))


def test_the_alarm_names_metrics_that_the_page_lists() -> None:
    [rules] = [YAML(typ="safe").load(block.text) for block in blocks("docs/operations.md") if block.language == "yaml"]
    listed = set(
        re.findall(r"^\| `(fencepost_\w+)` \|", (ROOT / "docs/operations.md").read_text("utf-8"), re.MULTILINE)
    )
    assert [set(re.findall(r"fencepost_\w+", rule["expr"])) <= listed for rule in rules] == [True]
