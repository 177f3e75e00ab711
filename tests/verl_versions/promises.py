"""What cannot be read out of our source: how verl calls us, and what it does besides.

Our code knows these from verl's source; each is named, so that docs/versions.md can say what a version without it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

_LOOP = "verl.experimental.agent_loop.agent_loop"
_V1 = "verl.trainer.ppo.v1"
_SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Code that must stand in a function, class or module of verl; strings in single quotes, no comments."""

    name: str
    within: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A call of something of ours: verl passes nothing that it does not take, and everything that it needs."""

    name: str
    within: str
    callee: str
    ours: str
    all_named: bool = False
    """What ours takes as `**` has another meaning: here every keyword must be a parameter by name."""
    besides: tuple[str, ...] = ()
    """Keywords that are not ours but the callee's own."""


LINES = (
    Line(name="plugins are imported", within="verl", words=("group='verl.plugins'",)),
    Line(name="named modules are imported", within="verl", words=("'VERL_USE_EXTERNAL_MODULES'",)),
    Line(
        name="loops are looked up in the registry",
        within=f"{_LOOP}:AgentLoopWorker._run_agent_loop",
        words=("_agent_loop_registry[agent_name]", "agent_loop.run(sampling_params, **kwargs)"),
    ),
    Line(
        name="a conversation's purpose is known to the worker",
        within=f"{_LOOP}:get_trajectory_info",
        words=("'step'", "'rollout_n'", "'validate'"),
    ),
    Line(
        name="replicas are looked up in the registry",
        within="verl.workers.rollout.replica",
        words=("_registry: dict", "RolloutReplicaRegistry.register('sglang', _load_sglang)"),
    ),
    Line(
        name="a replica starts its server_class",
        within="verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangReplica.launch_servers",
        words=("self.server_class",),
    ),
    Line(
        name="V0 logs what its manager measured",
        within="verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit",
        words=(".meta_info['timing'])",),
    ),
    Line(name="the worker loads tools", within=f"{_LOOP}:AgentLoopWorker.__init__", words=("load_all_tools(",)),
    Line(
        name="the dataset loads tools",
        within="verl.utils.dataset.rl_dataset:RLHFDataset.__init__",
        words=("from verl.tools.tool_registry import load_all_tools",),
    ),
    Line(
        name="tool entries are told by config.type",
        within="verl.tools.tool_registry",
        words=("tool_config.config.type",),
    ),
    Line(
        name="rows with a reward are not scored",
        within=f"{_LOOP}:AgentLoopWorker._compute_score",
        words=("final_output.reward_score is None",),
    ),
    Line(
        name="the reward stands in rm_scores", within=f"{_LOOP}:AgentLoopOutput.as_dict", words=("output['rm_scores']",)
    ),
    Line(
        name="V0 reads reward_extra_info of the first row",
        within=f"{_LOOP}:AgentLoopWorker._postprocess",
        words=("reward_extra_infos[0].keys()",),
    ),
    Line(
        name="V1 passes a session", within=f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ._run_prompt", words=("session_id=i",)
    ),
    Line(
        name="V1 takes any number of rows",
        within=f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess",
        words=("if not outputs:", "isinstance(output, list)"),
    ),
    Line(
        name="V1 reads both weight versions",
        within=f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess",
        words=("'min_global_steps'", "'max_global_steps'"),
    ),
    Line(
        name="V1 fails on a filtered group without rows",
        within=f"{_V1}.replay_buffer:ReplayBuffer._dapo_filtered_keys",
        words=("missing_metric_uids",),
    ),
    Line(
        name="V1 filters groups by the reward itself",
        within=f"{_V1}.replay_buffer:ReplayBuffer._dapo_filtered_keys",
        words=("'rm_scores'",),
    ),
    Line(
        name="V1 takes a sampler of ours",
        within=f"{_V1}.trainer_base:PPOTrainer._build_replay_buffer",
        words=("custom_sampler",),
    ),
    Line(
        name="V1 counts a session once",
        within=f"{_V1}.utils:compute_advantage_for_multi_trajectories",
        words=("session",),
    ),
    Line(
        name="servers tell their weights' version",
        within=f"{_SERVER}.generate",
        words=("'global_steps': self.global_steps",),
    ),
    Line(
        name="the engine's device can be set",
        within="verl.workers.engine.base:EngineRegistry.get_engine_cls",
        words=("'VERL_ENGINE_DEVICE'",),
    ),
    Line(
        name="rollouts are looked up in the registry",
        within="verl.workers.rollout.base:get_rollout_class",
        words=("_ROLLOUT_REGISTRY[rollout_name, mode]",),
    ),
)

_OF_CLIENT = "verl.workers.rollout.llm_server:LLMServerClient.generate"
_CPU_SERVER = "sglang_multiturn.cpu.verl_replica:CpuServer"

CALLED = (
    Called(
        name="the loop is made",
        within=f"{_LOOP}:AgentLoopWorker._run_agent_loop",
        callee="hydra.utils.instantiate",
        ours="sglang_multiturn.verl_plugin.agent_loop:SglangMultiturnAgentLoop.__init__",
        all_named=True,
        besides=("config",),
    ),
    Called(
        name="a server is asked",
        within=_OF_CLIENT,
        callee="server.generate.remote",
        ours=f"{_CPU_SERVER}.generate",
    ),
    Called(
        name="a server is chosen",
        within=_OF_CLIENT,
        callee="self._acquire_server",
        ours="sglang_multiturn.verl_plugin.routes:RoutedClient._acquire",
    ),
    Called(
        name="a server is paused",
        within="verl.workers.rollout.replica:RolloutReplica.abort_all_requests",
        callee="server.abort_all_requests.remote",
        ours=f"{_CPU_SERVER}.abort_all_requests",
    ),
    Called(
        name="an SGLang server is paused",
        within="verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangReplica.abort_all_requests",
        callee="abort_all_requests.remote",
        ours="sglang_multiturn.verl_plugin.server:SglangServer.abort_all_requests",
    ),
)
