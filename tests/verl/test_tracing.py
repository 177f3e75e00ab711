"""verl's rollout tracing sees our conversations and tools, and costs nothing while it is off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.rollout_trace import RolloutTraceConfig

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.errors import ToolError
from sglang_multiturn.tools.base import BaseTool
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.tools.runtime import ToolRuntime
from sglang_multiturn.verl_plugin.tracing import TracedRuntime
from sglang_multiturn.verl_plugin.worker import WorkerContext, context_of

from in_worker import (
    SHOWN,
    PayingTool,
    RawWorker,
    ScriptedServers,
    demo_config,
    question,
    scripted,
    tool_yaml,
    two_turns,
    v0_batch,
    v1_session,
)


@dataclass
class Recorder:
    """What verl calls of the module `trackio`: the smallest of its backends."""

    logged: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @dataclass
    class Trace:
        messages: list[dict[str, Any]]
        metadata: dict[str, Any]

    def log(self, traces: dict[str, Trace], step: int | None = None) -> None:
        for name, trace in traces.items():
            self.logged.append((name.removeprefix("rollout_trace/"), trace.metadata | {"step": step}))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [metadata for said, metadata in self.logged if said.endswith(name)]


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, calculator_yaml: Path) -> DictConfig:
    config = demo_config(tmp_path, tiny_model, calculator_yaml)
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, PayingTool)
    return config


@pytest.fixture
def backend() -> Iterator[Recorder]:
    RolloutTraceConfig.reset()
    traced = RolloutTraceConfig.get_instance()
    traced.backend, traced.client, traced.token2text, traced._initialized = "trackio", Recorder(), True, True
    yield traced.client
    RolloutTraceConfig.reset()


async def test_a_conversation_and_its_tool_calls_are_traced(
    config: DictConfig, template: HFChatTemplate, backend: Recorder
) -> None:
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = AgentLoopWorker(config, ScriptedServers(engine))
        done = await worker.generate_sequences(v0_batch([question()]))
    assert len(done) == 1
    (conversation,) = backend.of("SglangMultiturnAgentLoop.run")
    (call,) = backend.of("_ToolCall.execute")
    assert call["inputs"] == {"tool": "calculator", "parameters": {"expression": "2+2"}}
    assert call["output"] == {"text": "4", "reward": 0.25, "metrics": {}, "stop": False}
    assert (call["step"], call["validate"], conversation["step"]) == (5, False, 5)
    assert conversation["output"]["response_text"].endswith("The answer is 4.<|im_end|>")
    json.dumps(backend.logged)


async def test_a_sample_that_verl_leaves_out_is_not_traced(
    config: DictConfig, template: HFChatTemplate, backend: Recorder
) -> None:
    """V1's worker leaves out all of them (agent_loop_tq.py:85)."""
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        (row,) = await v1_session(RawWorker(config, ScriptedServers(engine)))
    assert (row.reward_score, backend.logged) == (1.0, [])


class UnwillingTool(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, float, dict]:
        raise ToolError("not today")


async def test_what_a_tool_raises_is_traced_and_reaches_the_session_as_it_is(backend: Recorder) -> None:
    async with TracedRuntime(ToolRegistry([UnwillingTool({}, SHOWN)])) as runtime:
        host = runtime.tool("calculator").host
        assert runtime.tool("calculator").host is host
        instance = await host.create("r1", {})
        with pytest.raises(ToolError, match="not today"):
            await host.execute(instance, {"expression": "1"}, {})
        assert (host.is_alive(instance), host.leaks().live_instances) == (True, 1)
        assert await host.calc_reward(instance, {}) == 0.0
        await host.release(instance, {})
        assert (host.is_alive(instance), host.leaks().live_instances) == (False, 0)
    (call,) = backend.of("_ToolCall.execute")
    assert (call["status"], call["exception_type"]) == ("error", "ToolError")


def made_context(config: DictConfig, servers: ScriptedServers, worker: AgentLoopWorker) -> WorkerContext:
    """What the loop has made for this worker."""
    (entry,) = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    keys = {key: value for key, value in entry.items() if key != "_target_"}
    return context_of(config, servers, worker.tokenizer, worker.tools, keys)


async def test_without_a_backend_tools_run_as_they_always_do(config: DictConfig, template: HFChatTemplate) -> None:
    assert RolloutTraceConfig.get_backend() is None
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        servers = ScriptedServers(engine)
        worker = RawWorker(config, servers)
        await v1_session(worker)
        context = made_context(config, servers, worker)
        assert type(context.rollout.tool_runtime) is ToolRuntime
        assert context.in_flight() == []
