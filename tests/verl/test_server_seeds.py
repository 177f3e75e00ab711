"""Seeds of requests: the same for the same conversation in every run, and what SGLang draws with on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.schemas import Message
from sglang_multiturn.verl_plugin.generator import VerlGenerator
from sglang_multiturn.verl_plugin.seeds import Seeds, seed_of

Python = Callable[..., CompletedProcess[str]]

HASHES = """
import importlib.util, json, torch
from sglang_multiturn.cpu.determinism import murmur_hash32
path = importlib.util.find_spec("sglang").submodule_search_locations[0] + "/srt/layers/utils/hash.py"
spec = importlib.util.spec_from_file_location("sglangs_hash", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
seeds = torch.tensor([0, 1, 2**31 - 1, 12345678901234], dtype=torch.uint64)
positions, columns = torch.tensor([0, 7, 1000, 2**31]), torch.arange(300)
theirs = module.murmur_hash32(seeds, positions, columns).to(torch.int64)
print(json.dumps([torch.equal(theirs, murmur_hash32(seeds, positions, columns)), len(set(theirs.flatten().tolist()))]))
"""


def spec(**fields: Any) -> RequestSpec:
    message = Message(role="user", content="2+2?")
    return RequestSpec(**{"request_id": "r", "uid": "u", "messages": (message,), **fields})


def seed(rollout: dict[str, Any], **fields: Any) -> int | None:
    return Seeds(OmegaConf.create(rollout)).seeded(spec(**fields)).sampling.seed


def test_without_full_determinism_no_request_has_a_seed() -> None:
    assert seed({"seed": 1, "full_determinism": False}) is None


def test_a_seed_names_the_run_the_row_the_sample_and_the_step() -> None:
    run = {"seed": 1, "full_determinism": True}
    seeds = {
        seed(run | {"seed": run_seed}, input_index=row, sample_index=sample, step=step, validate=validate)
        for run_seed in (1, 2)
        for row in range(3)
        for sample in range(4)
        for step in range(3)
        for validate in (False, True)
    }
    assert len(seeds) == 2 * 3 * 4 * 3 * 2
    assert seed(run, input_index=5) == seed(run, input_index=5, request_id="another")


def test_a_turns_seed_is_the_same_in_every_process_and_knows_no_attempt() -> None:
    assert seed_of(1, 2, 3) == 1049912948
    params = SamplingParams(max_new_tokens=3, seed=7)
    generator = VerlGenerator(object(), rollout_name="sglang")
    turns = [generator.sampling_params(params, turn=turn)["sampling_seed"] for turn in (0, 1, 0)]
    assert turns[0] == turns[2] != turns[1]
    assert all(0 <= turn < 2**31 for turn in turns)


def test_only_servers_that_take_a_seed_are_sent_one() -> None:
    params = SamplingParams(max_new_tokens=3, seed=7)
    assert "sampling_seed" not in VerlGenerator(object(), rollout_name="vllm").sampling_params(params)
    assert "sampling_seed" not in VerlGenerator(object(), rollout_name="sglang").sampling_params(SamplingParams())


def test_the_hash_on_a_cpu_is_sglangs_own(run_python: Python) -> None:
    """SGLang's is a Triton kernel, which Triton's interpreter runs without a GPU."""
    pytest.importorskip("sglang")
    pytest.importorskip("triton")
    done = run_python(HASHES, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, 1200]
