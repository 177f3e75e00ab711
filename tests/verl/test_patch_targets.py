"""Everything of verl that is patched, registered with, or relied on by name. One of these fails when verl moves it."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("verl")

import cloudpickle
import torch
from verl.experimental.agent_loop import agent_loop
from verl.tools import tool_registry
from verl.utils import fsdp_utils
from verl.utils.dataset import rl_dataset
from verl.workers.rollout import base, replica

from sglang_multiturn.verl_plugin import compat


def test_the_loop_registry_is_where_verl_looks_loops_up() -> None:
    assert "_agent_loop_registry[agent_name]" in inspect.getsource(agent_loop.AgentLoopWorker._run_agent_loop)
    assert agent_loop._agent_loop_registry[compat.LOOP_NAME]["_target_"] == compat.LOOP_CLASS


def test_the_worker_reads_tools_by_the_patched_name() -> None:
    assert "load_all_tools(" in inspect.getsource(agent_loop.AgentLoopWorker.__init__)
    assert agent_loop.load_all_tools is tool_registry.load_all_tools
    assert inspect.unwrap(agent_loop.load_all_tools) is not agent_loop.load_all_tools


def test_the_dataset_reads_tools_by_the_patched_name() -> None:
    source = inspect.getsource(rl_dataset.RLHFDataset.__init__)
    assert "from verl.tools.tool_registry import load_all_tools" in source


def test_both_workers_run_loops_through_the_patched_method() -> None:
    from verl.trainer.ppo.v1 import AgentLoopWorkerTQ

    original = inspect.unwrap(agent_loop.AgentLoopWorker._run_agent_loop)
    assert original is not agent_loop.AgentLoopWorker._run_agent_loop
    assert list(inspect.signature(original).parameters)[:3] == ["self", "sampling_params", "trajectory"]
    assert "self._run_agent_loop(sample_sampling_params, trajectory_info[i]," in inspect.getsource(
        agent_loop.AgentLoopWorker.generate_sequences
    )
    v1 = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert v1._run_agent_loop.__wrapped__ is agent_loop.AgentLoopWorker._run_agent_loop  # Ray wraps every method
    assert "self._run_agent_loop(" in inspect.getsource(v1._run_prompt)


def test_the_patched_method_reaches_verls_workers_by_its_name() -> None:
    """Else Ray would send them verl's own code with a copy of the loop registry in it."""
    patched = agent_loop.AgentLoopWorker._run_agent_loop
    assert cloudpickle.loads(cloudpickle.dumps(patched)) is patched
    assert len(cloudpickle.dumps(patched)) < 200


def test_the_v1_trainer_still_logs_what_its_buffer_says_and_gives_its_own_more() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    assert "metrics.update(off_policy_metrics)" in inspect.getsource(PPOTrainer._step_once)
    assert "refill_fn=self._add_prompts_to_generate" in inspect.getsource(PPOTrainer._build_replay_buffer)


def test_the_v0_trainer_still_logs_the_times_of_its_manager() -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    assert 'timing_raw.update(combined_gen_output.meta_info["timing"])' in inspect.getsource(RayPPOTrainer.fit)
    assert "self._performance_metrics(metrics, output)" in inspect.getsource(
        inspect.unwrap(agent_loop.AgentLoopManager.generate_sequences)
    )


def test_verls_loader_still_has_the_signature_that_is_replaced() -> None:
    original = inspect.unwrap(tool_registry.load_all_tools)
    assert list(inspect.signature(original).parameters) == ["tool_config_path", "function_tool_path"]


def test_verls_loader_still_refuses_a_config_without_type(calculator_yaml) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Exception, match="type"):
        inspect.unwrap(tool_registry.load_all_tools)(str(calculator_yaml), None)


def test_verls_schema_still_drops_what_is_nested() -> None:
    from verl.tools.schemas import OpenAIFunctionPropertySchema

    kept = OpenAIFunctionPropertySchema.model_validate({"type": "array", "items": {"type": "string"}})
    assert "items" not in kept.model_dump()


def test_only_the_v1_worker_passes_a_session_and_takes_no_rows() -> None:
    from verl.trainer.ppo.v1 import agent_loop_tq

    v1 = inspect.getsource(agent_loop_tq)
    assert "session_id=i" in v1
    assert "if not outputs:" in v1
    assert "session_id" not in inspect.getsource(agent_loop)


def test_the_group_filter_still_raises_on_a_group_without_rows() -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    assert "missing_metric_uids" in inspect.getsource(ReplayBuffer._dapo_filtered_keys)


def test_the_cpu_platform_is_verls_platform_here() -> None:
    from verl.plugin.platform import get_platform

    from sglang_multiturn.cpu.verl_platform import CpuPlatform

    assert isinstance(get_platform(), CpuPlatform)


def test_the_cpu_parts_stand_where_verl_looks_for_them() -> None:
    from sglang_multiturn.cpu.verl_replica import CpuReplica, CpuServerAdapter

    assert replica.get_rollout_replica_class("sglang_cpu") is CpuReplica
    assert base.get_rollout_class("sglang_cpu") is CpuServerAdapter
    assert fsdp_utils.CPUOffloadPolicy(pin_memory=True).pin_memory is False
    assert torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=True).pin_memory is True


def test_the_cpu_server_has_every_method_verl_calls_on_a_server() -> None:
    from sglang_multiturn.cpu.verl_replica import CpuServer

    called = set()
    for line in inspect.getsource(replica.RolloutReplica).splitlines():
        if "server." in line and ".remote(" in line:
            called.add(line.split("server.")[1].split(".remote")[0])
    assert called >= {"sleep", "wake_up", "abort_all_requests", "resume_generation", "clear_kv_cache"}
    assert {name for name in called if not hasattr(CpuServer, name)} == set()


def test_the_cpu_engine_lookup_finds_the_fsdp_engine() -> None:
    from verl.workers.engine import EngineRegistry

    assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHead"
