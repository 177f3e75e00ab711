"""What a turn costs in Python: this package's loop beside verl's own `ToolAgentLoop`, in one process, one after the other.

    python benchmarks/overhead.py                 # the table
    python benchmarks/overhead.py --json out.json # and the figures, with versions and machine

Both get the same scripted replies with no latency, the same tool and Qwen3's real tokenizer, so what is measured is
everything but the model: templates, parsing, masks, tool calls, scheduling. Figures are CPU microseconds a turn and
the longest time the event loop did not run anything else; read the ratio, machines differ.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_multiturn import (
    BaseTool,
    HFChatTemplate,
    Message,
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    ScriptedTurn,
    ToolRegistry,
)
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

SHAPES = ((64, 4), (256, 4), (16, 64), (4, 200))
"""Conversations at once, tool turns of each."""
REPEATS = 3
CALL = (
    "I need the remainder first, before I can multiply it by the price of one piece.\n"
    '<tool_call>\n{"name": "calc", "arguments": {"a": "16 - 3 - 4 * 2"}}\n</tool_call>'
)
ANSWER = "The answer is 18."
REPLY = "The result of the expression is 5. Go on with the next step of the problem."
MESSAGES = [
    {"role": "system", "content": "You solve problems step by step."},
    {"role": "user", "content": "A farmer sells eggs. How much does the farmer earn every day?"},
]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One measurement."""

    cpu_us_a_turn: float
    longest_stall_ms: float


async def measure(turns: int, work: Callable[[], Awaitable[object]]) -> Cost:
    """CPU time and event-loop stalls while `work` runs."""
    stalls: list[float] = []

    async def beat() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            stalls.append(time.perf_counter() - before - 0.001)

    heart = asyncio.create_task(beat())
    await asyncio.sleep(0)
    started = time.process_time()
    await work()
    cpu_s = time.process_time() - started
    await asyncio.sleep(0.002)
    heart.cancel()
    with suppress(asyncio.CancelledError):
        await heart
    return Cost(cpu_us_a_turn=cpu_s / turns * 1e6, longest_stall_ms=max(stalls) * 1e3)


class Ours:
    """This package, as it runs standalone."""

    def __init__(self, tokenizer: Any) -> None:
        class Calc(BaseTool):
            async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
                return REPLY, 0.0, {}

        self.template = HFChatTemplate(tokenizer)
        schema = ToolSchema(function=FunctionSchema.model_validate(SCHEMA["function"]))
        self.tools = ToolRegistry([Calc({}, schema)])
        self.call, self.answer = (
            ScriptedTurn(token_ids=tuple(tokenizer.encode(text, add_special_tokens=False))) for text in (CALL, ANSWER)
        )

    async def run(self, conversations: int, tool_turns: int) -> None:
        """All conversations at once."""
        config = RolloutConfig(max_assistant_turns=tool_turns + 1, max_response_tokens=65_536, max_concurrent=1024)
        engine = ScriptedEngine(
            self.template, lambda g, _: self.call if g.turn < tool_turns else self.answer, max_model_len=100_000
        )
        messages = tuple(Message.model_validate(message) for message in MESSAGES)
        async with RolloutEngine(engine, template=self.template, tools=self.tools, config=config) as rollouts:
            finished = await rollouts.run_all(
                RequestSpec(request_id=str(i), uid=str(i), messages=messages) for i in range(conversations)
            )
        assert all(t.metrics.assistant_turns == tool_turns + 1 for t in finished)


class Verl:
    """verl's `ToolAgentLoop` with a server that answers at once."""

    def __init__(self, tokenizer: Any) -> None:
        import verl
        from hydra import compose, initialize_config_dir
        from verl.tools.base_tool import BaseTool as VerlBaseTool
        from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

        class Calc(VerlBaseTool):
            async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
                return instance_id or "x", ToolResponse()

            async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
                return ToolResponse(text=REPLY), 0.0, {}

        self.tokenizer = tokenizer
        with suppress_output():
            self.tool = Calc({"type": "native"}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        folder = str(Path(verl.__file__).parent / "trainer" / "config")
        overrides = [
            "actor_rollout_ref.model.path=none",
            "actor_rollout_ref.rollout.name=sglang",
            "data.max_prompt_length=768",
            "data.max_response_length=65536",
            "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=4",
        ]
        with initialize_config_dir(folder, version_base=None):
            self.config = compose("ppo_trainer", overrides=overrides)
        end = tokenizer.eos_token_id
        self.call_ids = [*tokenizer.encode(CALL, add_special_tokens=False), end]
        self.answer_ids = [*tokenizer.encode(ANSWER, add_special_tokens=False), end]

    async def run(self, conversations: int, tool_turns: int) -> None:
        """All conversations at once."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(tool_turns)) for _ in range(conversations)]
        assert all(task.result().num_turns == 2 * tool_turns + 2 for task in tasks)

    async def _one(self, tool_turns: int) -> Any:
        from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
        from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
        from verl.utils.dataset.rl_dataset import RLHFDataset
        from verl.workers.rollout.replica import TokenOutput

        call_ids, answer_ids = self.call_ids, self.answer_ids

        class Server:
            calls = 0

            async def generate(self, **_: Any) -> TokenOutput:
                self.calls += 1
                await asyncio.sleep(0)
                ids = call_ids if self.calls <= tool_turns else answer_ids
                return TokenOutput(token_ids=list(ids), log_probs=[-0.5] * len(ids))

        loop = ToolAgentLoop(
            trainer_config=DictConfigWrap(self.config),
            server_manager=Server(),
            tokenizer=self.tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(self.config.data),
            hf_model_type="qwen3",
            tools=ToolListWrap([self.tool]),
        )
        return await loop.run({}, raw_prompt=[dict(message) for message in MESSAGES])


class suppress_output:  # noqa: N801 - reads as a statement
    """verl's BaseTool prints its schema."""

    def __enter__(self) -> None:
        self._stdout, sys.stdout = sys.stdout, open("/dev/null", "w", encoding="utf-8")

    def __exit__(self, *exc_info: object) -> None:
        sys.stdout.close()
        sys.stdout = self._stdout


async def compare(subjects: dict[str, Ours | Verl]) -> list[dict[str, Any]]:
    """Every shape, the subjects in turn, REPEATS times; medians."""
    for subject in subjects.values():
        await subject.run(4, 2)  # warm caches
    rows = []
    for conversations, tool_turns in track(SHAPES, description="measuring", console=Console(stderr=True)):
        costs: dict[str, list[Cost]] = {name: [] for name in subjects}
        for _ in range(REPEATS):
            for name, subject in subjects.items():
                turns = conversations * (tool_turns + 1)
                costs[name].append(await measure(turns, functools.partial(subject.run, conversations, tool_turns)))
        row: dict[str, Any] = {"conversations": conversations, "tool_turns": tool_turns}
        for name, measured in costs.items():
            row[name] = asdict(
                Cost(
                    cpu_us_a_turn=statistics.median(c.cpu_us_a_turn for c in measured),
                    longest_stall_ms=statistics.median(c.longest_stall_ms for c in measured),
                )
            )
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table of the README."""
    table = Table(
        "conversations", "tool turns", "ours µs/turn", "verl µs/turn", "ratio", "ours stall ms", "verl stall ms"
    )
    for row in rows:
        ours, verl = row["ours"], row.get("verl")
        table.add_row(
            str(row["conversations"]),
            str(row["tool_turns"]),
            f"{ours['cpu_us_a_turn']:.0f}",
            f"{verl['cpu_us_a_turn']:.0f}" if verl else "-",
            f"{verl['cpu_us_a_turn'] / ours['cpu_us_a_turn']:.1f}x" if verl else "-",
            f"{ours['longest_stall_ms']:.0f}",
            f"{verl['longest_stall_ms']:.0f}" if verl else "-",
        )
    Console().print(table)


def main() -> None:
    """Measure, print, and write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write figures, versions and machine here too")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("SGLANG_MULTITURN_CPU", "1")  # lets verl be imported where there is no accelerator
    from families import tokenizer

    qwen = tokenizer("qwen3")
    subjects: dict[str, Ours | Verl] = {"ours": Ours(qwen)}
    try:
        subjects["verl"] = Verl(qwen)
    except ImportError as error:
        print(f"verl is not measured: {error}", file=sys.stderr)
    rows = asyncio.run(compare(subjects))
    show(rows)
    if arguments.json:
        about = {
            "machine": f"{platform.machine()}, {platform.processor() or 'unknown processor'}",
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("sglang_multiturn", "transformers", "verl")},
            "repeats": REPEATS,
        }
        arguments.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
