"""Runs the doctor in this process, on the tiny model's tokenizer with files of a case laid over it. No weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_multiturn.cli import app

# verl installs the CPU platform while it is imported, which the doctor does for a launch.
os.environ.setdefault("SGLANG_MULTITURN_CPU", "1")

REPOSITORY = Path(__file__).parents[2]
HEALTHY = Path(__file__).parent / "healthy"
TINY_MODEL = REPOSITORY / "examples" / "gsm8k_tool" / "tiny_model"


@dataclass(frozen=True)
class Report:
    """What `doctor --json` said."""

    exit_code: int
    json: dict[str, Any]

    def of(self, severity: str) -> list[dict[str, str]]:
        return [finding for finding in self.json["findings"] if finding["severity"] == severity]

    def checks(self, severity: str) -> list[str]:
        return [finding["check"] for finding in self.of(severity)]


Doctor = Callable[..., Report]
MakeModel = Callable[..., Path]
Launch = Callable[..., str]


@pytest.fixture
def doctor() -> Doctor:
    def run(*options: object) -> Report:
        done = CliRunner().invoke(app, ["doctor", "--json", *map(str, options)], catch_exceptions=False)
        return Report(done.exit_code, json.loads(done.stdout))

    return run


@pytest.fixture
def healthy() -> Path:
    return HEALTHY


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """The tiny model's folder without its weights, the files of `changed` laid over it and some taken away."""

    def make(changed: Path | None = None, removed: Sequence[str] = ()) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(TINY_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        if changed is not None and changed.is_dir():
            shutil.copytree(changed, folder, dirs_exist_ok=True)
        for name in removed:
            (folder / name).unlink()
        return folder

    return make


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """An `@file` of a healthy launch and of what a case adds to it."""

    def write(added: str, *, model: object, here: Path) -> str:
        lines = (HEALTHY / "overrides.txt").read_text() + added
        (tmp_path / "launch.txt").write_text(lines.format(healthy=HEALTHY, model=model, here=here))
        return f"@{tmp_path / 'launch.txt'}"

    return write
