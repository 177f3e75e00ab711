"""Without an optional package: one sentence that names the pip command, and everything else still works."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = "import sys; sys.modules.update(dict.fromkeys({packages!r})); "


def run_without(packages: list[str], code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT.format(packages=packages) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("package", "code", "said"),
    [
        (
            "transformers",
            "from sglang_multiturn import HFChatTemplate; HFChatTemplate.from_pretrained('some/model')",
            "a model's chat template needs transformers, which is not installed: pip install 'sglang_multiturn[chat]'",
        ),
        (
            "sglang",
            "import asyncio; from sglang_multiturn import SGLangEngine; asyncio.run(SGLangEngine('some/model').start())",
            "the sglang engine needs sglang, which is not installed: pip install 'sglang_multiturn[sglang]'",
        ),
        (
            "sglang",
            "from sglang_multiturn import ByteChatML; from sglang_multiturn.chat.parsers import make_parser; "
            "make_parser('qwen3_coder', ByteChatML())",
            "the tool parser 'qwen3_coder' needs sglang, which is not installed: pip install 'sglang_multiturn[sglang]'",
        ),
        (
            "pyarrow",
            "from sglang_multiturn.dataset import read_rows; import pathlib; "
            "pathlib.Path('{tmp}/rows.parquet').write_bytes(b''); list(read_rows('{tmp}/rows.parquet'))",
            "reading parquet needs pyarrow, which is not installed: pip install 'sglang_multiturn[parquet]'",
        ),
    ],
)
def test_a_missing_package_is_one_sentence(tmp_path: Path, package: str, code: str, said: str) -> None:
    done = run_without([package], code.replace("{tmp}", str(tmp_path)))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith(said)


def test_the_light_installation_rolls_out_without_any_of_them(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    code = (
        "sys.argv = ['sglang-multiturn', 'rollout', '--engine', 'scripted', '--script', 'calls:2', "
        f"'--tools', 'tool_configs/calculator.yaml', '--data', '{tmp_path}/rows.jsonl', '--out', '{tmp_path}/out']; "
        "from sglang_multiturn.__main__ import main; main()"
    )
    heavy = ["torch", "transformers", "sglang", "ray", "verl", "aiohttp", "pyarrow", "numpy"]
    done = run_without(heavy, code)
    assert done.returncode == 0, done.stderr
    assert "1 in " in done.stderr


def test_a_process_prepares_itself_for_sglang_though_its_parent_was_prepared() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    code = (
        "from sglang_multiturn.cpu.sglang_kernels import prepare_on_cpu; prepare_on_cpu(); prepare_on_cpu(); "
        "import sglang.srt.function_call.function_call_parser"
    )
    environment = os.environ | {"SGLANG_MULTITURN_CPU_STAND_IN": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
