"""Memory of requests is asked before state (I6)."""

from __future__ import annotations

import grpc

from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.refusals import refused


async def test_a_repeat_finds_its_run_although_the_active_definition_refuses_its_input_now(api: Api) -> None:
    await api.register(manifest(1))
    first = await api.start(input='"text"', request_key="k", request_id="i")
    await api.register(manifest(1, compatibility_id="2", workflow={"input_schema": {"type": "integer"}}))
    by_id = await api.start(input='"text"', request_key="k", request_id="i")
    assert by_id == first
    by_key = await api.start(input='"text"', request_key="k")
    assert (by_key.run_id, by_key.created) == (first.run_id, False)
    with refused("REQUEST_KEY_CONFLICT", grpc.StatusCode.ALREADY_EXISTS):
        await api.start(input='"other text"', request_key="k")
    with refused("INPUT_SCHEMA_MISMATCH", grpc.StatusCode.INVALID_ARGUMENT):
        await api.start(input='"text"', request_key="another")
