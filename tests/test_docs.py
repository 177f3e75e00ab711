"""What the documents say is run: README's first block, and every setting in docs/settings.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_multiturn.config import RENAMED, RolloutConfig


def test_the_readmes_first_program_prints_what_it_says() -> None:
    blocks = re.search(r"```python\n(.*?)```\n```\n(.*?)```", Path("README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks is not None
    done = subprocess.run([sys.executable, "-c", blocks[1]], capture_output=True, text=True, check=True)
    assert done.stdout == blocks[2]


@pytest.mark.parametrize("name", RolloutConfig.model_fields)
def test_every_setting_is_documented_with_its_default(name: str) -> None:
    default = RolloutConfig.model_fields[name].default
    row = f"| `{name}` | {'none' if default is None else default} | "
    lines = [line for line in Path("docs/settings.md").read_text(encoding="utf-8").splitlines() if line.startswith(row)]
    assert len(lines) == 1
    assert len(lines[0]) > len(row) + 10


def test_old_names_are_documented() -> None:
    text = Path("docs/settings.md").read_text(encoding="utf-8")
    assert all(f"`{old}` → `{new}`" in text for old, new in RENAMED.items())


def test_the_architecture_page_knows_every_module() -> None:
    page = Path("docs/architecture.md").read_text(encoding="utf-8")
    root = Path("sglang_multiturn")
    top = {path.stem for path in root.glob("*.py")} | {path.name for path in root.iterdir() if path.is_dir()}
    unnamed = {name for name in top if not name.startswith("_") and f"`{name}" not in page}
    assert unnamed == set()
