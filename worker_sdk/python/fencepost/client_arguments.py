"""What callers give the clients, looked at before anything is sent: else a message of the contract refuses it, in words
that name neither the argument nor what it has to be.

Caller: `calls`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fencepost.models import StartRun
from fencepost.policies import Fault, Seconds, raise_all, seconds_in
from fencepost.steps import Step
from fencepost.workflow import Workflow


def check_start(start: StartRun) -> None:
    """Raise TypeError or ValueError that names every argument of a start which can't be right."""
    faults: list[Fault] = [
        *_workflow_faults(start.workflow_id, start.input),
        *text_faults(
            request_key=start.request_key,
            user_id=start.user_id,
            definition_hash=start.definition_hash,
            dedupe_key=start.dedupe_key,
        ),
        *label_faults(start.attributes),
        *_length_faults("start_delay", start.start_delay),
        *_length_faults("run_timeout", start.run_timeout),
    ]
    priority: object = start.priority
    if priority is not None and not hasattr(priority, "__index__"):
        faults.append(TypeError(f"priority: a whole number from 1 to 5, not {priority!r}"))
    policy: object = start.on_active_duplicate
    if policy not in ("conflict", "bind"):
        faults.append(ValueError(f"on_active_duplicate is {policy!r}, neither 'conflict' nor 'bind'"))
    raise_all("start of a run", faults)


def text_faults(**texts: object) -> Iterator[Fault]:
    """Those of the arguments that are no text; None stands for nothing."""
    for argument, text in texts.items():
        if text is not None and not isinstance(text, str):
            yield TypeError(f"{argument}: it is text, not {text!r}")


def label_faults(attributes: object) -> Iterator[Fault]:
    """What is wrong with the types of labels, each of them; None stands for none."""
    if attributes is None:
        return
    if not isinstance(attributes, Mapping):
        yield TypeError(f"attributes: a dict of text to text, not {attributes!r}")
        return
    for key, value in attributes.items():
        if not isinstance(key, str) or not isinstance(value, str):
            yield TypeError(f"attributes: names and values are text, not {key!r}: {value!r}")


def states_in(states: object) -> tuple[Any, ...]:
    """What was given for several states, or for the only one."""
    return tuple(states) if isinstance(states, Iterable) and not isinstance(states, str) else (states,)


def state_faults(states: Iterable[object]) -> Iterator[Fault]:
    """What is no text, and so neither a state nor the name of one; which names there are is not looked at."""
    for state in states:
        if not isinstance(state, str):
            yield TypeError(f"states: a RunState, its name, or a list of them, not {state!r}")


def _workflow_faults(workflow: object, given: object) -> Iterator[Fault]:
    if isinstance(workflow, Step):
        yield TypeError(
            f"workflow_id: the step {workflow.name} is no workflow: start one that runs it, "
            "a manifest or a function with @workflow"
        )
    elif isinstance(workflow, Workflow):
        if given is not None and not workflow.takes_input:
            told = repr(given)[:100]
            yield TypeError(f"input: workflow {workflow.workflow_id} takes none, so {told} would be lost: leave it out")
    elif not isinstance(workflow, str):
        yield TypeError(f"workflow_id: a workflow is its id or a function with @workflow, not {workflow!r}")


def _length_faults(argument: str, length: Seconds | None) -> Iterator[Fault]:
    if length is not None:
        try:
            seconds_in(length, argument)
        except (TypeError, ValueError) as error:
            yield error
