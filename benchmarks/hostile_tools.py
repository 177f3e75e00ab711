"""What four hostile tool calls cost sixty conversations beside them: nothing but what the machine is busy with.

    python benchmarks/hostile_tools.py                 # the table, after about a minute
    python benchmarks/hostile_tools.py --json out.json # and every figure, with versions and machine

64 conversations at once on the scripted engine, each with a process of its own for its tool (`execution: process`). In a
clean run all of them nap their way to an answer. In a hostile run one call hangs for ever, one spins, one forks without
end and one allocates without end. Clean and hostile runs take turns on one and the same host, so that each clean run but
the first shows that it still serves.

The other sixty must say and read the very tokens of the clean runs, or this fails. What is measured is when the last of
them ended. Generations and naps take their time without using the processor, since only then is there room for a call
that spins on one of few cores until its timeout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from sglang_multiturn import (
    ByteChatML,
    GenerationId,
    Message,
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.config import ToolConfig, ToolsConfig
from sglang_multiturn.engine.scripts import call_text
from sglang_multiturn.trajectory import CallOutcome

CONVERSATIONS, TURNS = 64, 8
GENERATION_S, NAP_S = 0.3, 0.1
TIMEOUT_S, MAX_MEMORY_MB, MAX_PROCESSES = 5.0, 512, 16
HOSTILE = {"r10": "hang", "r25": "spin", "r40": "fork", "r55": "allocate"}
"""What four conversations do in their third turn of a hostile run."""
HOSTILE_TURN = 2
ROUNDS = 5
MARK = "SGLANG_MULTITURN_BENCHMARK"
"""Environment variable by which every process is found that descends from this one."""
console = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One batch of 64."""

    hostile: bool
    others_s: float
    """When the last of the sixty ended that never do harm."""
    all_s: float
    outcomes: dict[str, list[str]]
    """Of each hostile conversation: how its hostile call ended, and why the conversation did."""
    processes_after: int
    """Descendants of this process that are alive once all conversations have ended."""


async def measure(rounds: int) -> list[Run]:
    """Clean and hostile runs in turn, after one that warms up."""
    script = _Script()
    engine = ScriptedEngine(ByteChatML(), script, latency_s=GENERATION_S)
    config = RolloutConfig(max_concurrent=CONVERSATIONS, max_response_tokens=8192)
    async with RolloutEngine(engine, template=ByteChatML(), tools=registry(), config=config) as rollouts:
        expected: dict[str, list[int]] = {}
        await one_run(rollouts, script, expected, hostile=False)
        return [
            await one_run(rollouts, script, expected, hostile=hostile)
            for _ in range(rounds)
            for hostile in (False, True)
        ]


class _Script:
    """Naps, then an answer."""

    hostile = False

    def __call__(self, generation: GenerationId, input_ids: Sequence[int]) -> str:
        if generation.turn >= TURNS:
            return "I am done."
        misbehaves = self.hostile and generation.turn == HOSTILE_TURN
        what = HOSTILE.get(generation.request_id, "nap") if misbehaves else "nap"
        return call_text("do", {"what": what})


def registry() -> ToolRegistry:
    """The tool as a YAML would say it."""
    entry = ToolConfig(
        class_name="misbehaving_tool.MisbehavingTool",
        config={"nap_s": NAP_S},
        execution="process",
        timeout_s=TIMEOUT_S,
        max_memory_mb=MAX_MEMORY_MB,
        max_processes=MAX_PROCESSES,
    )
    return ToolRegistry.from_config(ToolsConfig(tools=[entry]))


async def one_run(rollouts: RolloutEngine, script: _Script, expected: dict[str, list[int]], *, hostile: bool) -> Run:
    """All conversations once; `expected` are the tokens of the sixty, filled by the first run."""
    script.hostile = hostile
    asked = Message(role="user", content="Do what you like.")
    specs = [RequestSpec(request_id=f"r{i}", uid=f"r{i}", messages=(asked,)) for i in range(CONVERSATIONS)]
    started = time.monotonic()
    others_s = all_s = 0.0
    finished: dict[str, Trajectory] = {}
    async for trajectory in rollouts.run(specs):
        finished[trajectory.request_id] = trajectory
        all_s = time.monotonic() - started
        if trajectory.request_id not in HOSTILE:
            others_s = all_s
    compare({name: one for name, one in finished.items() if name not in HOSTILE}, expected)
    run = Run(
        hostile=hostile,
        others_s=others_s,
        all_s=all_s,
        outcomes={HOSTILE[name]: outcomes(finished[name]) for name in HOSTILE} if hostile else {},
        processes_after=descendants(),
    )
    console.print(str(run), highlight=False, soft_wrap=True)
    return run


def compare(others: dict[str, Trajectory], expected: dict[str, list[int]]) -> None:
    """End this benchmark unless every conversation of the sixty went as it did in the first run, which must be well."""
    for name, one in others.items():
        well = [call.outcome for call in one.tool_calls] == [CallOutcome.OK] * TURNS
        if not well or one.response_ids != expected.setdefault(name, one.response_ids):
            calls = [f"{call.outcome}: {call.answer}" for call in one.tool_calls]
            raise SystemExit(f"{name} went otherwise than in the clean run; its calls were {calls}")


def outcomes(trajectory: Trajectory) -> list[str]:
    """How the call of the hostile turn ended, and why the conversation did."""
    call = next(call for call in trajectory.tool_calls if call.turn == HOSTILE_TURN)
    return [call.outcome.value, trajectory.stop_reason.value]


def descendants() -> int:
    """Processes that carry this one's mark, wherever in the tree they hang by now."""
    found = 0
    for process in psutil.process_iter():
        try:
            found += process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]
        except psutil.Error:  # it has just ended, or belongs to somebody else
            continue
    return found


def show(runs: Sequence[Run]) -> None:
    """When the sixty ended, and how the four hostile calls and their conversations did."""
    table = Table("run", "the sixty ended after, s (median)", "ratio", "all ended after, s", "processes afterwards")
    clean_s = statistics.median(run.others_s for run in runs if not run.hostile)
    for hostile in (False, True):
        some = [run for run in runs if run.hostile is hostile]
        others_s = statistics.median(run.others_s for run in some)
        table.add_row(
            "four hostile calls" if hostile else "clean",
            f"{others_s:.2f}",
            f"{others_s / clean_s:.2f}",
            f"{statistics.median(run.all_s for run in some):.2f}",
            f"{max(run.processes_after for run in some)}",
        )
    table.caption = "; ".join(
        f"{what}: {', '.join(sorted({' → '.join(run.outcomes[what]) for run in runs if run.hostile}))}"
        for what in HOSTILE.values()
    )
    Console(width=110).print(table)


def main() -> None:
    """Measure, print, and write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of a clean run and a hostile one")
    parser.add_argument("--json", type=Path, help="write every figure, with versions and machine, here")
    arguments = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    load_before = os.getloadavg()[0]
    runs = asyncio.run(measure(arguments.rounds))
    show(runs)
    if arguments.json:
        about = {
            "machine": f"{platform.machine()}, {platform.processor() or 'unknown processor'}, {os.cpu_count()} cores",
            "load_before": load_before,
            "python": platform.python_version(),
            "versions": {"sglang_multiturn": version("sglang_multiturn")},
            "conversations": CONVERSATIONS,
            "turns": TURNS,
            "generation_s": GENERATION_S,
            "nap_s": NAP_S,
            "timeout_s": TIMEOUT_S,
            "runs": [asdict(run) for run in runs],
        }
        arguments.json.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
