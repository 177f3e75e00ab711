"""`make prove`: every invariant over very many random conversations of every family.

    python -m conversations.prove --examples 20000 --out outputs/prove.json

A family's templates (`KIN`) share its conversations. Two processes take one template after the other, from both ends of
the list, so that a vocabulary is mostly read once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import multiprocessing
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TYPE_CHECKING

from conversations.choices import SIZE
from conversations.invariants import check_conversation
from conversations.search import Found, again, search
from conversations.worlds import world
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from families import FAMILIES, NAMES

if TYPE_CHECKING:
    Counts = Queue[tuple[str, int]]

PROCESSES = 2
KIN = (
    ("qwen3", "qwen3_instruct_2507"),
    ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
    ("llama3", "llama3_1", "llama3_2"),
    ("deepseekv3", "deepseek_r1_distill"),
    ("gemma", "gemma3"),
    ("gemma4", "gemma4_v5"),
    ("phi3", "phi3_5"),
    ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
    ("lfm2_v2", "lfm2_2_5_v2"),
    ("cohere2", "command_a", "command_a_tool_use"),
    ("mistral_v1", "mistral_v2v3", "mistral_v3_tekken", "mistral_v7_tekken"),
)
"""Templates of one family; one that is not here is a family by itself."""
CONSOLE = Console(width=110, highlight=False)
_counts: Counts | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when an invariant was violated."""
    parser = argparse.ArgumentParser(prog="conversations.prove", description=__doc__)
    parser.add_argument(
        "--examples", type=int, default=20_000, help="conversations a family, shared by its templates (%(default)s)"
    )
    parser.add_argument("--family", action="append", choices=NAMES, help="only this one; may be given several times")
    parser.add_argument("--seed", type=int, default=None, help="of the random conversations (default: a new one)")
    parser.add_argument("--out", type=Path, default=Path("outputs/prove.json"), help="where to write it (%(default)s)")
    parser.add_argument("--again", metavar="HEX", help="have one conversation of one family again")
    chosen = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    families = [name for name in chosen.family or NAMES if not _is_missing(name)]
    if chosen.again is not None:
        return have_again(families[0], bytes.fromhex(chosen.again))
    seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    started = time.monotonic()
    found = prove(shares(families, chosen.examples), seed)
    seconds = time.monotonic() - started
    CONSOLE.print(table_of(found, seconds))
    for violated in (one for one in found if one.violation is not None):
        CONSOLE.print(f"\n{violated.family} (seed {seed}): {violated.violation}", markup=False, soft_wrap=True)
    _write(chosen.out, found, seed, seconds)
    return int(any(one.violation is not None for one in found))


def shares(names: Sequence[str], examples: int) -> dict[str, int]:
    """How many conversations each template has, so that each family has at least `examples`."""
    kin = {name: [one for one in family if one in names] for family in KIN for name in family}
    return {name: math.ceil(examples / len(kin.get(name, [name]))) for name in names}


def prove(examples: dict[str, int], seed: int) -> list[Found]:
    """What was found, with so many conversations of each template, in their order."""
    families = list(examples)
    context = multiprocessing.get_context("spawn")
    counts: Counts = context.Queue()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    workers = [
        ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(counts,)) for _ in range(PROCESSES)
    ]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=CONSOLE) as progress:
        bar = progress.add_task("conversations", total=sum(examples.values()))
        found = _share_out(deque(_by_vocabulary(families)), examples, seed, workers, counts, progress, bar)
    for worker in workers:
        worker.shutdown()
    return sorted(found, key=lambda one: families.index(one.family))


def _share_out(
    left: deque[str],
    examples: dict[str, int],
    seed: int,
    workers: Sequence[ProcessPoolExecutor],
    counts: Counts,
    progress: Progress,
    bar: TaskID,
) -> list[Found]:
    """Give each process its next family, the first ones from the left, the last ones from the right."""
    running: dict[Future[Found], int] = {}
    found: list[Found] = []
    done: dict[str, int] = {}

    def give(number: int) -> None:
        if left:
            family = left.popleft() if number % 2 == 0 else left.pop()
            running[workers[number].submit(_search, family, examples[family], seed)] = number

    for number in range(len(workers)):
        give(number)
    while running:
        ended, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
        for future in ended:
            number = running.pop(future)
            found.append(future.result())
            done[found[-1].family] = examples[found[-1].family]
            give(number)
        while not counts.empty():
            family, count = counts.get()
            done[family] = max(count, done.get(family, 0))
        progress.update(bar, completed=sum(done.values()))
    return found


def _begin(counts: Counts) -> None:
    global _counts
    _counts = counts
    logging.disable(logging.CRITICAL)


def _search(family: str, examples: int, seed: int) -> Found:
    def report(count: int) -> None:
        assert _counts is not None
        _counts.put((family, count))

    return search(family, examples, seed=seed, progress=report)


def _by_vocabulary(families: Sequence[str]) -> list[str]:
    return sorted(families, key=lambda name: FAMILIES[name].source if name in FAMILIES else "")


def _is_missing(family: str) -> bool:
    reason = FAMILIES[family].missing() if family in FAMILIES else None
    if reason is not None:
        CONSOLE.print(f"{family} is left out: {reason}", markup=False)
    return reason is not None


def table_of(found: Sequence[Found], seconds: float) -> Table:
    """A line a family, and the sum."""
    table = Table(title=f"Invariants over random conversations ({seconds / 60:.1f} minutes)")
    table.add_column("template", no_wrap=True)
    table.add_column("vocabulary")
    for name in ("conversations", "generations", "tokens", "rendered", "violations", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        vocabulary = "stand-in" if one.stand_in else "own"
        counts = (one.conversations, one.generations, one.tokens, one.turns_rendered, int(one.violation is not None))
        table.add_row(one.family, vocabulary, *(f"{count:,}" for count in counts), f"{one.seconds:.0f}")
    table.add_section()
    sums = [sum(getattr(one, name) for one in found) for name in ("conversations", "generations", "tokens")]
    sums += [sum(one.turns_rendered for one in found), sum(one.violation is not None for one in found)]
    table.add_row(
        f"{len(found)} templates", "", *(f"{count:,}" for count in sums), f"{sum(f.seconds for f in found):.0f}"
    )
    return table


def have_again(family: str, data: bytes) -> int:
    """One conversation, told and checked."""
    data = data.ljust(SIZE, bytes(1))
    CONSOLE.print(again(family, data), markup=False, soft_wrap=True)
    check_conversation(data, world(family))
    CONSOLE.print("every invariant holds")
    return 0


def _write(file: Path, found: Sequence[Found], seed: int, seconds: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    told = {"seed": seed, "seconds": round(seconds), "families": [dataclasses.asdict(one) for one in found]}
    file.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
