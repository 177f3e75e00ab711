"""What people see of a standalone run in their terminal: where it was taken up, how it goes, and what it came to."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sglang_multiturn.failures import printable
from sglang_multiturn.run_folder.asked import Asked
from sglang_multiturn.run_folder.folder import Stock
from sglang_multiturn.summary import RunSummary

_SHOWN = 10
console = Console(stderr=True)


def say(lines: Iterable[str]) -> None:
    """Lines as they stand, each on one line."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def resumed_lines(stock: Stock, asked: Asked, folder: Path) -> list[str]:
    """Where a run is taken up again."""
    goes_on = f"{folder}: {stock.summary.rollouts} of {asked.rollouts} are done"
    if stock.in_flight:
        goes_on += f", {len(stock.in_flight)} were in flight ({_some(stock.in_flight)})"
    if stock.retried:
        goes_on += f", {len(stock.retried)} had FAILED and are asked again ({_some(stock.retried)})"
    lines = [goes_on + (", resuming" if stock.left else "; nothing is left to do")]
    if stock.held:
        held = _some([f"{one.tool} of {one.request_id} (instance {one.instance_id})" for one in stock.held])
        lines.append(
            f"{len(stock.held)} tool instances were not released when their process was killed: {held}; all of them stand "
            f"in {folder / 'trajectories.marks'}"
        )
    if changed := asked.other_versions():
        lines.append(f"other versions than when the run began: {', '.join(changed)}")
    return lines


def how_to_go_on(finished: int, total: int, folder: Path) -> str:
    """What to type when a run ended before its end."""
    command = f"sglang-multiturn rollout --resume {shlex.quote(str(folder))}"
    return f"{finished} of {total} are done and kept. To go on with the rest:\n\n    {command}"


@contextmanager
def progress(summary: RunSummary, total: int) -> Iterator[Callable[[], None]]:
    """A bar of how many of `total` are in `summary`, some of them already; what is yielded draws it again."""
    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, completed=summary.rollouts, said="")

        def advance() -> None:
            bar.update(task, completed=summary.rollouts, said=_said_so_far(summary))

        yield advance


def print_summary(summary: RunSummary, wall_s: float, trajectories: Path) -> None:
    """The figures of a run that has ended."""
    table = Table(show_header=False, box=None)
    table.add_row("rollouts", f"{summary.rollouts} in {wall_s:.1f} s, {summary.failed} failed")
    if not math.isnan(summary.reward_mean):
        table.add_row("reward", f"{summary.reward_mean:.4f} on average")
    table.add_row(
        "tools",
        f"called in {summary.tool_call_rate:.1%} of the rollouts, {summary.metrics.tool_calls} calls, "
        f"{summary.malformed_call_rate:.1%} malformed",
    )
    table.add_row("turns", f"{summary.turns_mean:.2f} on average")
    speed = summary.sampled_tokens / max(wall_s, 1e-9)
    table.add_row("tokens", f"{summary.sampled_tokens} sampled ({speed:.0f} a second)")
    table.add_row("ended", ", ".join(f"{name} {count}" for name, count in summary.ends))
    table.add_row("written", str(trajectories))
    console.print(table)
    say([*_leak_lines(summary), *summary.failures.lines()])


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


def _said_so_far(summary: RunSummary) -> str:
    said = f"turns {summary.turns_mean:.1f} · failed {summary.failed}"
    return said if math.isnan(summary.reward_mean) else f"reward {summary.reward_mean:.3f} · {said}"


def _some(names: Sequence[str]) -> str:
    shown = [printable(name)[:200] for name in itertools.islice(names, _SHOWN)]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
