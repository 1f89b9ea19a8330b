"""What tasks that wait cost the others: the benchmark `backlog`.

- `empty`: no task waits but those of the round.
- `other_queue`: very many wait in a queue that the workers do not serve.
- `same_queue`: very many wait in the workers' own queue, and they are what the workers work off.

Three databases with a server and a worker each, in turns.
"""

from __future__ import annotations

from benchmarks import seeding
from benchmarks.compare import compare
from benchmarks.load import Load
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage
from benchmarks.workflow import INPUT, WORKFLOW, manifest

OTHER = "bench-other"


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `backlog`."""
    empty = await Load.on(stage, plan.slots)
    other = await _with_backlog(stage, plan, OTHER)
    same = await _with_backlog(stage, plan, WORKFLOW)
    results = Results(stage, "backlog", plan)
    await empty.complete(plan.warm_up_runs)
    await other.complete(plan.warm_up_runs)
    await same.work_off(plan.warm_up_runs * STEPS)
    circumstances = {
        "empty": lambda: empty.complete(plan.runs),
        "other_queue": lambda: other.complete(plan.runs),
        "same_queue": lambda: same.work_off(plan.runs * STEPS),
    }

    async def one(number: int) -> None:
        await compare(results, circumstances, number)

    await results.rounds(one)
    size = f"{plan.rounds} rounds of {plan.runs:,} runs of {STEPS} steps, {plan.backlog_tasks:,} tasks waiting"
    return results.report(size, runs=plan.runs, slots=plan.slots, waiting_tasks=await _waiting(other))


async def _with_backlog(stage: Stage, plan: Plan, workflow: str) -> Load:
    dsn = await stage.database()
    load = await Load.on(stage, plan.slots, dsn=dsn)
    await load.client.register_definition(manifest(OTHER, queue="other"))
    [run_id] = await load.start(workflow, [INPUT])
    # The workers of `same_queue` must find enough, whatever the size of the rest.
    copies = plan.backlog_tasks + (plan.runs + plan.slots) * (plan.rounds + 1) * (workflow == WORKFLOW)
    await seeding.multiply(stage, dsn, run_id, copies)
    if (waiting := await _waiting(load)) <= plan.backlog_tasks:
        raise BenchmarkFailed(f"{waiting} of {plan.backlog_tasks} tasks wait")
    stage.note(f"backlog: {waiting:,} tasks of {workflow} wait")
    return load


async def _waiting(load: Load) -> int:
    question = "select count(*) from task where lease_session is null"
    [[count]] = await (await load.connection.execute(question)).fetchall()
    return int(count)
