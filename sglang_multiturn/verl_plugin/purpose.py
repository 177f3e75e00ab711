"""What verl runs a conversation for: training or validation, in which step.

verl's worker knows (`trajectory` of `AgentLoopWorker._run_agent_loop`) and does not tell its loops. The patch in `compat`
notes it here before verl's own code runs; whatever the conversation starts inherits it, as context variables are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """Of one conversation."""

    validate: bool
    step: int
    """`global_steps` of the trainer; of a validation the step it follows, 0 before training."""
    sample_index: int = 0
    """Which of its prompt's samples it is, as far as V0 knows; V1 says it to the loop itself (`session_id`)."""


_PURPOSE: ContextVar[Purpose | None] = ContextVar("sglang_multiturn_purpose", default=None)


def told_purpose() -> Purpose | None:
    """What verl said of the conversation that runs here; None where this verl was not adapted."""
    return _PURPOSE.get()


@contextlib.contextmanager
def for_purpose(trajectory: Mapping[str, Any]) -> Iterator[None]:
    """Note what verl says of a conversation while it runs; `trajectory` as `get_trajectory_info` makes it."""
    token = _PURPOSE.set(_purpose_of(trajectory))
    try:
        yield
    finally:
        _PURPOSE.reset(token)


def _purpose_of(trajectory: Mapping[str, Any]) -> Purpose | None:
    """None where a worker of somebody else's says it otherwise: other loops run through here too."""
    try:
        return Purpose(
            validate=bool(trajectory["validate"]),
            step=max(0, int(trajectory["step"])),  # -1 where the batch has no step
            sample_index=int(trajectory["rollout_n"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
