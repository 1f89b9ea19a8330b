"""The soak, short: a handful of faults, with a fixed seed. `make faults` has all of them, for as long as you like."""

from __future__ import annotations

import json

from tests.faults.soak.findings import Rule
from tests.faults.soak.plan import faults
from tests.faults.soak.soaking import soak
from tests.faults.soak.stage import WORKERS, stage

SEED, FAULTS, EVERY = 7, 6, 2.5
KINDS = (
    "kill worker",
    "kill server",
    "restart database",
    "reset worker link",
    "reset database link",
    "black hole on client link",
)


async def test_nothing_is_lost_repeated_or_stuck_while_everything_fails_in_turn() -> None:
    plan = faults(SEED, FAULTS, len(WORKERS), KINDS)
    async with stage() as played:
        report = await soak(played, SEED, plan, EVERY)
    # How long recoveries take is for `make faults` to hold: here other tests have the processors, too.
    assert [str(finding) for finding in report.findings if finding.rule is not Rule.BOUND] == []
    told = json.loads(report.as_json())
    assert told["faults_total"] == told["recoveries"] == FAULTS
    assert sorted(told["faults"]) == sorted(KINDS)
    assert told["programs"] >= 20
    assert told["effects_tried"] > told["programs"]


def test_a_seed_repeats_its_faults_and_another_has_others() -> None:
    assert faults(SEED, 100, 3) == faults(SEED, 100, 3)
    assert faults(SEED, 100, 3) != faults(SEED + 1, 100, 3)
    assert {fault.kind for fault in faults(SEED, 40, 3)} == {fault.kind for fault in faults(SEED + 1, 40, 3)}
