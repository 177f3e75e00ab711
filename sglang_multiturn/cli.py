"""The command line. Every command reads its input completely before it starts an engine."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import RolloutConfig, ToolsConfig, validate_config
from sglang_multiturn.dataset import in_groups, read_rows, spec_from_row
from sglang_multiturn.doctor.command import doctor, shipped_tools
from sglang_multiturn.engine.base import Engine, SamplingParams
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.journal import JournalWriter
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.rewards import check_weights, load_reward_fn
from sglang_multiturn.runner import RolloutEngine
from sglang_multiturn.summary import RunSummary
from sglang_multiturn.tools.registry import ToolRegistry

app = typer.Typer(
    help="Multi-turn, tool-using rollouts on SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(doctor)
console = Console(stderr=True)


class EngineName(StrEnum):
    """Engines the command line can start."""

    SGLANG = "sglang"
    SCRIPTED = "scripted"


@app.callback()
def _root() -> None:
    """Multi-turn, tool-using rollouts on SGLang."""


@app.command()
def rollout(
    data: Annotated[Path, typer.Option(help="Rows as .jsonl or .parquet: verl's shape, or {'messages': [...]}.")],
    out: Annotated[Path, typer.Option(help="Folder for trajectories.jsonl and summary.json.")],
    model: Annotated[str | None, typer.Option(help="Model folder or hub name; not needed by a scripted run.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="Tool YAML, or the name of a shipped one: calculator, gsm8k.")
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="'scripted' is a dry run without a model.")] = EngineName.SGLANG,
    script: Annotated[
        str, typer.Option(help="Scripted only: calls:N, gsm8k, or file.py:function (RequestSpec -> turns).")
    ] = "calls:1",
    reward: Annotated[str | None, typer.Option(help="gsm8k, or file.py[:function] with verl's signature.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts a row: the group size.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(help="-1 is off.")] = -1,
    max_response_tokens: Annotated[int | None, typer.Option(help="Budget of a whole conversation.")] = None,
    max_assistant_turns: Annotated[int | None, typer.Option(help="Generations a conversation.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Conversations at the same time.")] = None,
    rollout_timeout_s: Annotated[float | None, typer.Option(help="Seconds a conversation may take.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the engine.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace what an earlier run left in --out.")] = False,
) -> None:
    """Roll out every row of a data file and write one trajectory for each.

    Try it without a model:

        sglang-multiturn rollout --engine scripted --script calls:2 --tools tool_configs/calculator.yaml --data rows.jsonl --out runs/dry
    """
    asked = {
        "max_response_tokens": max_response_tokens,
        "max_assistant_turns": max_assistant_turns,
        "max_concurrent": max_concurrent,
        "rollout_timeout_s": rollout_timeout_s,
    }
    tools_config = ToolsConfig.from_yaml(shipped_tools(tools)) if tools else ToolsConfig()
    config = _override(tools_config.rollout, {key: value for key, value in asked.items() if value is not None})
    registry = ToolRegistry.from_config(tools_config, str(tools or "tools"))
    check_weights(config, registry.names)
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    specs = _read_specs(data, sampling, samples, limit, registry)
    trajectories = _prepare_out(out, overwrite)
    template = _template(model, engine)
    live, specs_in_order = _engine(engine, model, template, script, registry, specs, seed)
    with JournalWriter(trajectories) as journal:
        rollouts = RolloutEngine(
            live,
            template=template,
            tools=registry,
            config=config,
            reward_fn=load_reward_fn(reward) if reward else None,
            journal=journal,
        )
        finished = asyncio.run(_roll_out(rollouts, specs_in_order, len(specs)))
    summary = {**finished.summary.to_dict(), "wall_s": finished.wall_s}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _print_summary(finished, trajectories)


@dataclass(frozen=True, slots=True)
class _Finished:
    summary: RunSummary
    wall_s: float


async def _roll_out(rollouts: RolloutEngine, specs: Iterator[RequestSpec], total: int) -> _Finished:
    summary = RunSummary()
    with _progress(total) as advance:
        async with rollouts:
            started = time.monotonic()
            async for trajectory in rollouts.run(specs):
                summary.add(trajectory)
                advance(summary)
            summary.held = rollouts.held_by_tools()
            return _Finished(summary, time.monotonic() - started)


def _override(config: RolloutConfig, asked: dict[str, Any]) -> RolloutConfig:
    given = {key: getattr(config, key) for key in config.model_fields_set}
    return validate_config({**given, **asked}, RolloutConfig, "command line")


def _read_specs(
    data: Path, sampling: SamplingParams, samples: int, limit: int | None, registry: ToolRegistry
) -> list[RequestSpec]:
    specs = []
    for index, (place, row) in enumerate(read_rows(data)):
        if index == limit:
            break
        uid = str(index)
        spec = spec_from_row(row, place=place, request_id=uid, uid=uid, input_index=index, sampling=sampling)
        registry.check_row(spec, place)  # a row that names a tool nobody configured is found before anything runs
        specs.append(spec)
    return list(in_groups(specs, samples))


def _prepare_out(out: Path, overwrite: bool) -> Path:
    trajectories = out / "trajectories.jsonl"
    if trajectories.exists() and trajectories.stat().st_size:
        if not overwrite:
            raise ConfigError(f"{trajectories} exists already; give another --out, or --overwrite to replace it")
        trajectories.unlink()
    out.mkdir(parents=True, exist_ok=True)
    return trajectories


def _template(model: str | None, engine: EngineName) -> ChatTemplate:
    if model is not None:
        from sglang_multiturn.chat.hf_template import HFChatTemplate

        return HFChatTemplate.from_pretrained(model)
    if engine is EngineName.SGLANG:
        raise ConfigError("--engine sglang needs --model; for a dry run without one use --engine scripted")
    from sglang_multiturn.chat.byte_chatml import ByteChatML

    return ByteChatML()


def _engine(
    name: EngineName,
    model: str | None,
    template: ChatTemplate,
    script: str,
    registry: ToolRegistry,
    specs: list[RequestSpec],
    seed: int,
) -> tuple[Engine, Iterator[RequestSpec]]:
    if name is EngineName.SCRIPTED:
        from sglang_multiturn.engine.scripted import ScriptedEngine
        from sglang_multiturn.engine.scripts import PlannedScript, load_plan

        planned = PlannedScript(load_plan(script, registry.schemas()), template)
        return ScriptedEngine(template, planned), planned.watch(specs)
    from sglang_multiturn.engine.sglang_engine import SGLangEngine

    assert model is not None  # _template saw to it
    return SGLangEngine(model, random_seed=seed), iter(specs)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total, said="")

        def advance(summary: RunSummary) -> None:
            progress.update(task, completed=summary.rollouts, said=_said_so_far(summary))

        yield advance


def _said_so_far(summary: RunSummary) -> str:
    said = f"turns {summary.turns_mean:.1f} · failed {summary.failed}"
    return said if math.isnan(summary.reward_mean) else f"reward {summary.reward_mean:.3f} · {said}"


def _print_summary(finished: _Finished, trajectories: Path) -> None:
    summary = finished.summary
    table = Table(show_header=False, box=None)
    table.add_row("rollouts", f"{summary.rollouts} in {finished.wall_s:.1f} s, {summary.failed} failed")
    if not math.isnan(summary.reward_mean):
        table.add_row("reward", f"{summary.reward_mean:.4f} on average")
    table.add_row(
        "tools",
        f"called in {summary.tool_call_rate:.1%} of the rollouts, {summary.metrics.tool_calls} calls, "
        f"{summary.malformed_call_rate:.1%} malformed",
    )
    table.add_row("turns", f"{summary.turns_mean:.2f} on average")
    speed = summary.sampled_tokens / max(finished.wall_s, 1e-9)
    table.add_row("tokens", f"{summary.sampled_tokens} sampled ({speed:.0f} a second)")
    table.add_row("ended", ", ".join(f"{name} {count}" for name, count in summary.stop_reasons.most_common()))
    table.add_row("written", str(trajectories))
    console.print(table)
    for line in [*_leak_lines(summary), *summary.failures.lines()]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _leak_lines(summary: RunSummary) -> list[str]:
    leaks, metrics = summary.leaks, summary.metrics
    if leaks.clean:
        return []
    return [
        f"tool instances: {metrics.tool_instances_created} created, {metrics.tool_instances_released} released, "
        f"{leaks.lost_instances} lost with their process, {leaks.not_released} not released; "
        f"{leaks.release_errors} releases failed, {leaks.left_behind_calls} calls were left behind, "
        f"{leaks.live_processes} processes are still there"
    ]
