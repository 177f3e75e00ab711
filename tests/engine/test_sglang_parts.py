"""The pieces around SGLang that can be shown without starting it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.subjects import TINY_MODEL

from sglang_multiturn.cpu import sglang_kernels
from sglang_multiturn.engine.sglang_child.launch import engine_arguments
from sglang_multiturn.engine.sglang_child.messages import Start
from sglang_multiturn.engine.sglang_child.weights import check_tensors, checkpoint_shapes, to_torch, without_tied_head
from sglang_multiturn.errors import EngineStartError, WeightUpdateError

KNOWN = {"model_path", "dtype", "device", "max_total_tokens", "tp_size", "weight_version"}


def _start(**server_args: object) -> Start:
    return Start(
        model_path=str(TINY_MODEL),
        dtype="auto",
        device=None,
        context_length=None,
        random_seed=0,
        server_args=server_args,
    )


def test_only_arguments_sglang_knows_are_passed() -> None:
    assert engine_arguments(_start(), device="cpu", known=KNOWN) == {
        "model_path": str(TINY_MODEL),
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 16_384,
        "weight_version": "0",
    }


def test_a_gpu_gets_no_cpu_settings_and_the_users_arguments_win() -> None:
    arguments = engine_arguments(_start(tp_size=2, max_total_tokens=9), device="cuda", known=KNOWN)
    assert arguments == {
        "model_path": str(TINY_MODEL),
        "dtype": "auto",
        "device": "cuda",
        "weight_version": "0",
        "tp_size": 2,
        "max_total_tokens": 9,
    }


def test_an_unknown_argument_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(EngineStartError, match="ServerArgs has no 'tpsize'; did you mean 'tp_size'"):
        engine_arguments(_start(tpsize=2), device="cpu", known=KNOWN)


def test_an_argument_of_the_engine_itself_is_refused() -> None:
    with pytest.raises(EngineStartError, match="'dtype' is an argument of SGLangEngine"):
        engine_arguments(_start(dtype="float16"), device="cpu", known=KNOWN)


def test_shapes_are_read_from_the_checkpoint() -> None:
    shapes = checkpoint_shapes(str(TINY_MODEL))
    assert shapes is not None
    config = json.loads((TINY_MODEL / "config.json").read_text())
    assert shapes["model.embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])


def test_a_folder_without_safetensors_cannot_be_checked(tmp_path: Path) -> None:
    assert checkpoint_shapes(str(tmp_path)) is None
    check_tensors(None, [("anything", (1,))])


def test_many_wrong_tensors_are_counted() -> None:
    with pytest.raises(WeightUpdateError, match=r"^w0 is not .*; w1 is not .*; w2 is not .*; and 2 more$"):
        check_tensors({"a": (1,)}, [(f"w{i}", (1,)) for i in range(5)])


def test_the_output_head_is_dropped_only_where_it_is_tied() -> None:
    head = [("lm_head.weight", np.zeros(1))]
    assert without_tied_head({"model.embed_tokens.weight": (1,)}, head) == []
    assert without_tied_head({"lm_head.weight": (1,)}, head) == head


def test_bfloat16_goes_over_by_its_bits() -> None:
    ml_dtypes: Any = pytest.importorskip("ml_dtypes")
    torch: Any = pytest.importorskip("torch")
    tensor = to_torch(np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16))
    assert (tensor.dtype, tensor.tolist()) == (torch.bfloat16, [1.5, -2.0])


def test_importing_the_engine_imports_nothing_heavy() -> None:
    program = (
        "import sys, sglang_multiturn.engine.sglang_engine, sglang_multiturn.cpu.sglang_kernels\n"
        "print([name for name in ('torch', 'sglang', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert _run(program) == "[]"


@pytest.mark.slow
def test_the_stand_in_is_appended_and_an_unknown_kernel_names_itself() -> None:
    pytest.importorskip("torch")
    program = (
        "import sys\n"
        "from sglang_multiturn.cpu import sglang_kernels\n"
        "print(sglang_kernels.prepare() == sglang_kernels.NOTICE, sys.path[-1].endswith('stand_in'))\n"
        "import sgl_kernel\n"
        "try:\n    sgl_kernel.rotary_embedding(1)\n"
        "except NotImplementedError as error:\n    print(str(error).split(' has')[0])"
    )
    assert _run(program) == "True True\nsgl_kernel.rotary_embedding"


def test_a_real_kernel_package_is_never_shadowed(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("real = True\n")
    program = (
        "from sglang_multiturn.cpu import sglang_kernels\n"
        "print(sglang_kernels.prepare())\n"
        "import sgl_kernel\nprint(sgl_kernel.real)"
    )
    assert _run(program, tmp_path) == "None\nTrue"


def test_the_notice_says_what_it_means_for_figures() -> None:
    assert "speed figures mean nothing" in sglang_kernels.NOTICE


def _run(program: str, *paths: Path) -> str:
    path = os.pathsep.join(str(folder) for folder in (Path(__file__).parents[2], *paths))
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()
