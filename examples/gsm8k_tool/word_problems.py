"""Word problems that a very small model can learn to solve with a calculator, and cannot solve without one.

Each problem takes two or three arithmetic steps. Its plan writes every step as one binary operation over the numbers of
the text (`a` to `d`) and earlier results (`r1`, `r2`), so a plan is at once the solution, the list of calculator calls of
a perfect conversation, and the way the answer is computed. Everything follows from a seed.

    python examples/gsm8k_tool/word_problems.py --out data/word_problems

writes `train.parquet` (1024 rows), `heldout.parquet` (512 rows, none of whose questions is among the training ones) and
`sample.jsonl` (16 held-out rows), in the shape verl's datasets have.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA_SOURCE = "word_problems"
SYSTEM_PROMPT = (
    "You solve word problems. Use the calculator for every step, one operation a call. Then say: The answer is N."
)
TRAIN_SEED, TRAIN_COUNT = 1, 1024
HELDOUT_SEED, HELDOUT_COUNT = 2, 512
SAMPLE_COUNT = 16

NAMES = ("Sam", "Ana", "Tom", "Lily", "Max", "Eva", "Ben", "Mia")
ITEMS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "beads")
SMALLEST, LARGEST = 11, 99
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of problem: its text and its plan over the names of the numbers."""

    text: str
    plan: tuple[str, ...]
    descending: str = ""
    """Names whose numbers are put in descending order, where the story needs it (nobody loses more than they have)."""


PATTERNS = (
    Pattern(
        "{name} has {a} {item} and buys {b} boxes with {c} {item} each. How many {item} in total?",
        ("b * c", "a + r1"),
    ),
    Pattern(
        "{name} fills {a} boxes with {b} {item} each, then loses {c} {item}. How many {item} are left?",
        ("a * b", "r1 - c"),
    ),
    Pattern(
        "{name} has {a} {item}, gets {b} more and gives away {c}. How many {item} are left?",
        ("a + b", "r1 - c"),
        descending="ac",
    ),
    Pattern(
        "Each of {a} friends of {name} gets {b} {item} and {c} {other}. How many things is that?",
        ("b + c", "r1 * a"),
    ),
    Pattern(
        "{name} has {a} {item} and loses {b}. {name} sells the rest at {c} dollars each. How many dollars is that?",
        ("a - b", "r1 * c"),
        descending="ab",
    ),
    Pattern(
        "{name} buys {a} {item} at {b} dollars and {c} {other} at {d} dollars. What is the total cost?",
        ("a * b", "c * d", "r1 + r2"),
    ),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One binary operation with its numbers filled in; `expression` is what a calculator is asked."""

    left: int
    operation: str
    right: int

    @property
    def expression(self) -> str:
        """The step as a calculator reads it."""
        return f"{self.left}{self.operation}{self.right}"

    @property
    def result(self) -> int:
        """What a calculator replies."""
        return OPERATIONS[self.operation](self.left, self.right)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the numbers in it, and the plan that solves it."""

    question: str
    numbers: dict[str, int]
    plan: tuple[str, ...]

    @property
    def steps(self) -> list[Step]:
        """The plan carried out."""
        return carry_out(self.plan, self.numbers)

    @property
    def answer(self) -> int:
        """The last step's result."""
        return self.steps[-1].result


def carry_out(plan: tuple[str, ...], numbers: dict[str, int]) -> list[Step]:
    """Fill in a plan's steps in order, the n-th result becoming `rn`."""
    known = dict(numbers)
    steps = []
    for count, line in enumerate(plan, start=1):
        left, operation, right = line.split()
        step = Step(known[left], operation, known[right])
        known[f"r{count}"] = step.result
        steps.append(step)
    return steps


def draw(rng: random.Random) -> Problem:
    """One problem, every choice of it made by `rng`."""
    pattern = rng.choice(PATTERNS)
    item, other = rng.sample(ITEMS, 2)
    numbers = {name: rng.randint(SMALLEST, LARGEST) for name in "abcd"}
    ordered = sorted((numbers[name] for name in pattern.descending), reverse=True)
    numbers.update(zip(pattern.descending, ordered, strict=True))
    question = pattern.text.format(name=rng.choice(NAMES), item=item, other=other, **numbers)
    return Problem(question=question, numbers=numbers, plan=pattern.plan)


def problems(seed: int) -> Iterator[Problem]:
    """Problems without end, the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        yield draw(rng)


def prompt(question: str) -> list[dict[str, str]]:
    """The messages that a conversation about `question` starts with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """A problem as one row of a verl dataset."""
    worked = [f"{step.expression}={step.result}" for step in problem.steps]
    truth = str(problem.answer)
    return {
        "data_source": DATA_SOURCE,
        "prompt": prompt(problem.question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.question,
            "answer": "\n".join([*worked, f"The answer is {truth}."]),
            "need_tools_kwargs": True,
            "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": truth}}},
        },
    }


def rows(seed: int, count: int, split: str) -> list[dict[str, Any]]:
    """The first `count` problems of `seed` as rows."""
    return [row(problem, split, index) for index, problem in zip(range(count), problems(seed), strict=False)]


def questions(dataset: list[dict[str, Any]]) -> set[str]:
    """The questions of a dataset."""
    return {entry["extra_info"]["question"] for entry in dataset}


def demo_datasets() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The demo's training and held-out rows; a question in both is an error, not a footnote."""
    train = rows(TRAIN_SEED, TRAIN_COUNT, "train")
    heldout = rows(HELDOUT_SEED, HELDOUT_COUNT, "heldout")
    shared = questions(train) & questions(heldout)
    if shared:
        raise ValueError(f"{len(shared)} held-out questions are training questions too, for example: {min(shared)}")
    return train, heldout


def to_jsonl(dataset: list[dict[str, Any]]) -> str:
    """Rows as JSONL, the same bytes on every machine."""
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in dataset)


def write(dataset: list[dict[str, Any]], path: Path) -> None:
    """Write rows as Parquet or JSONL, by the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text(to_jsonl(dataset), encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(dataset), path)
    else:
        raise ValueError(f"{path}: the suffix must be .parquet or .jsonl")


def main() -> None:
    """Write the demo's datasets."""
    parser = argparse.ArgumentParser(description="Write the word-problem datasets of the demo.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into; made if it is missing")
    out: Path = parser.parse_args().out
    train, heldout = demo_datasets()
    for name, dataset in (
        ("train.parquet", train),
        ("heldout.parquet", heldout),
        ("sample.jsonl", heldout[:SAMPLE_COUNT]),
    ):
        write(dataset, out / name)
        print(f"{out / name}: {len(dataset)} rows")


if __name__ == "__main__":
    main()
