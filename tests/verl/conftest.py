"""The verl tests run against verl as published, in this process and in processes of their own.

They need the CPU platform, and verl installs it while it is imported, so the variable is set before any test imports it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("SGLANG_MULTITURN_CPU", "1")
pytest.importorskip("verl")

from sglang_multiturn.chat.hf_template import HFChatTemplate

REPOSITORY = Path(__file__).parents[2]
Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tiny_model() -> Path:
    return REPOSITORY / "examples" / "gsm8k_tool" / "tiny_model"


@pytest.fixture
def template(tiny_model: Path) -> HFChatTemplate:
    return HFChatTemplate.from_pretrained(tiny_model)


@pytest.fixture
def calculator_yaml() -> Path:
    return REPOSITORY / "tool_configs" / "calculator.yaml"


@pytest.fixture
def run_python(tmp_path: Path) -> Python:
    """Run code in a fresh interpreter, where verl is not imported yet and nothing has been patched."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "VERL_"))}
        return subprocess.run(
            [sys.executable, "-c", code],
            env=kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A training run each: only where they are asked for."""
    if os.environ.get("VERL_MATRIX"):
        return
    left_out = [item for item in items if item.get_closest_marker("matrix") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("matrix") is None]
