"""What the documents say is run: README's first block, and every setting in docs/settings.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from sglang_multiturn.config import RENAMED, FailurePolicy, FaultConfig, GroupConfig, RolloutConfig, ToolSettings


def test_the_readmes_first_program_prints_what_it_says() -> None:
    blocks = re.search(r"```python\n(.*?)```\n```\n(.*?)```", Path("README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks is not None
    done = subprocess.run([sys.executable, "-c", blocks[1]], capture_output=True, text=True, check=True)
    assert done.stdout == blocks[2]


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("| key | default | meaning |", RolloutConfig),
        ("An entry of `tools:`", ToolSettings),
        ("| key of `faults` |", FaultConfig),
        ("| key of `on_failure` |", FailurePolicy),
        ("| key of `GroupConfig` |", GroupConfig),
    ],
)
def test_every_setting_is_documented_with_its_default(heading: str, model: type[BaseModel]) -> None:
    page = Path("docs/settings.md").read_text(encoding="utf-8")
    table = re.search(r"^\|---.*\n((?:\|.*\n)+)", page[page.index(heading) :], re.MULTILINE)
    assert table is not None
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1].splitlines()]
    assert {name: default for name, default, _ in rows} == {
        f"`{name}`": _shown(field.get_default(call_default_factory=True)) for name, field in model.model_fields.items()
    }
    assert all(len(meaning) > 10 for _, _, meaning in rows)


def _shown(default: object) -> str:
    if isinstance(default, BaseModel):
        return "see below"
    return "none" if default is None else str(default)


def test_old_names_are_documented() -> None:
    text = Path("docs/settings.md").read_text(encoding="utf-8")
    assert all(f"`{old}` → `{new}`" in text for old, new in RENAMED.items())


def test_the_architecture_page_knows_every_module() -> None:
    page = Path("docs/architecture.md").read_text(encoding="utf-8")
    root = Path("sglang_multiturn")
    top = {path.stem for path in root.glob("*.py")} | {path.name for path in root.iterdir() if path.is_dir()}
    unnamed = {name for name in top if not name.startswith("_") and f"`{name}" not in page}
    assert unnamed == set()
