"""Make verl datasets of GSM8K, with what one tool needs to know about each row.

    python examples/gsm8k_tool/prepare_gsm8k.py --out data/gsm8k
    python examples/gsm8k_tool/prepare_gsm8k.py --out data/gsm8k --tool calculator --local folder/with/jsonl

The first reads `openai/gsm8k` from the hub (package `datasets`), the second reads `train.jsonl` and `test.jsonl` from a
folder, one `{"question": ..., "answer": ...}` a line. The ground truth is the number after `#### ` in the answer, its
commas removed; the whole worked answer stays in `extra_info.answer`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from word_problems import write

from sglang_multiturn.errors import DataError, MissingDependencyError

DATA_SOURCE = "openai/gsm8k"
SPLITS = ("train", "test")
ENDING = "End with your final answer on a line of its own, in the form: #### <answer>"
SYSTEM_PROMPTS = {
    "calc_gsm8k_reward": (
        "You solve math problems, thinking step by step. Once you have an answer, check it with the calc_gsm8k_reward "
        "tool: a reward of 1.0 means that it is right, 0.0 that it is wrong. Where it is wrong, find the mistake and "
        f"check again. {ENDING}"
    ),
    "calculator": (
        "You solve math problems, thinking step by step. Do the arithmetic with the calculator tool rather than in "
        f"your head. {ENDING}"
    ),
}
"""The tools a dataset can be made for, and what the model is told about each."""

GROUND_TRUTH = re.compile(r"#### *(-?[\d,]*\.?\d+)\s*$")


class Source(NamedTuple):
    """One problem as published, and where it stands, for messages."""

    question: str
    answer: str
    place: str


def ground_truth(source: Source) -> str:
    """The number after `#### ` at the end of the worked answer, without commas."""
    found = GROUND_TRUTH.search(source.answer)
    if found is None:
        raise DataError(f"{source.place}: the answer does not end in '#### <number>': {source.answer[-60:]!r}")
    return found.group(1).replace(",", "")


def row(source: Source, tool: str, split: str, index: int) -> dict[str, Any]:
    """One problem as a row of a verl dataset, for the tool named."""
    truth = ground_truth(source)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPTS[tool]},
            {"role": "user", "content": source.question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": source.question,
            "answer": source.answer,
            "need_tools_kwargs": True,
            "tools_kwargs": {tool: {"create_kwargs": {"ground_truth": truth}}},
        },
    }


def local_problems(path: Path) -> Iterator[Source]:
    """The problems of a JSONL file."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; --local wants a folder with {' and '.join(f'{s}.jsonl' for s in SPLITS)}"
        )
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield parse_line(line, f"{path}:{number}")


def parse_line(line: str, place: str) -> Source:
    """One line of a JSONL file."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise DataError(f"{place}: expected an object with question and answer, got {type(entry).__name__}")
    return checked(entry, place)


def checked(entry: dict[str, Any], place: str) -> Source:
    """The entry's question and answer; both must be there and hold text."""
    for key in ("question", "answer"):
        value = entry.get(key)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{place}: {key} is missing or not text; the row has the keys {sorted(entry)}")
    return Source(entry["question"], entry["answer"], place)


def hub_problems(split: str) -> Iterator[Source]:
    """The problems of one split of `openai/gsm8k`."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependencyError.for_extra("reading GSM8K from the hub", "datasets", "verl") from error
    for index, entry in enumerate(load_dataset(DATA_SOURCE, "main", split=split)):
        yield checked(entry, f"{DATA_SOURCE} {split}[{index}]")


def rows(split: str, tool: str, local: Path | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of one split, from a local folder or from the hub; at most `limit` of them."""
    sources = local_problems(local / f"{split}.jsonl") if local else hub_problems(split)
    counted = enumerate(sources) if limit is None else zip(range(limit), sources, strict=False)
    made = [row(source, tool, split, index) for index, source in counted]
    if not made:
        raise DataError(f"{local / f'{split}.jsonl' if local else f'{DATA_SOURCE} {split}'}: no rows")
    return made


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Make verl datasets of GSM8K.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write into; made if it is missing")
    parser.add_argument("--tool", choices=tuple(SYSTEM_PROMPTS), default="calc_gsm8k_reward", help="tool to use")
    parser.add_argument("--local", type=Path, help="folder with train.jsonl and test.jsonl; without it, the hub")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="file format")
    parser.add_argument("--limit", type=int, help="take only the first rows of each split")
    return parser.parse_args()


def main() -> None:
    """Write one file a split."""
    arguments = parse_arguments()
    for split in SPLITS:
        try:
            made = rows(split, arguments.tool, arguments.local, arguments.limit)
        except (DataError, MissingDependencyError) as error:
            raise SystemExit(f"error: {error}") from error
        path = arguments.out / f"{split}.{arguments.format}"
        write(made, path)
        print(f"{path}: {len(made)} rows")


if __name__ == "__main__":
    main()
