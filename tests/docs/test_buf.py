"""`buf curl`, with reflection and no files, takes the demo's own workflow from its manifest to its history."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from examples.northwind import books, dataset
from tests.docs.pages import ROOT
from tests.fixtures.processes import Process
from tests.fixtures.servers import InProcessServer

BUF = Path(sys.executable).parent / "buf"
WORKFLOW = ROOT / "examples" / "northwind" / "workflow.yaml"


async def call(address: str, method: str, request: dict[str, Any], folder: Path) -> Any:
    """The answer to a call by `buf curl` from a folder without any file of the contract."""
    command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(request)]
    url = f"http://{address}/fencepost.v1.{method}"
    process = await asyncio.create_subprocess_exec(
        *command, url, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 150)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_buf_curl_takes_the_example_from_its_manifest_to_its_history(
    server: InProcessServer,
    fresh_dsn: str,
    python_process: Callable[..., Process],
    tmp_path: Path,
) -> None:
    data = dataset.load(2)  # the first one is refused at ship, and undone
    with psycopg.connect(fresh_dsn) as ledger:
        books.fill(ledger, data)
    address = server.grpc_address
    worker = python_process("-m", "examples.northwind.worker", "--address", address, "--ledger", fresh_dsn)

    manifest = {"yaml": WORKFLOW.read_text("utf-8")}
    registered = await call(address, "DefinitionService/RegisterDefinition", manifest, tmp_path)
    assert registered["created"] is True
    order = json.dumps(dataclasses.asdict(data.orders[1]), default=str)
    start = {"workflow_id": registered["definition"]["workflowId"], "input": {"json": order}}
    run = {"run_id": (await call(address, "RunService/StartRun", start, tmp_path))["runId"]}
    # The worker has to be there first, which takes a while where all CPUs are busy.
    waited = await call(address, "RunService/WaitRun", {**run, "timeout": "120s"}, tmp_path)
    assert (waited["ended"], waited["run"]["state"]) == (True, "RUN_STATE_COMPLETED")
    events = (await call(address, "RunService/GetHistory", run, tmp_path))["events"]
    assert [event["seq"] for event in events] == [str(number) for number in range(1, 15)]
    steps = [event["stepCompleted"]["nodeId"] for event in events if "stepCompleted" in event]
    assert steps == ["validate", "price", "reserve", "charge", "ship", "notify"]
    assert await asyncio.to_thread(worker.terminate) == 0
