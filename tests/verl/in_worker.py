"""verl's own worker in this process, in front of a scripted engine: for the tests of what our loop makes inside it."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_module
from launch import main_ppo_overrides  # type: ignore[import-not-found]  # examples/gsm8k_tool
from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.replica import TokenOutput

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.engine.base import GenerationId, SamplingParams
from sglang_multiturn.engine.scripted import Script, ScriptedEngine
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.base import BaseTool
from sglang_multiturn.trajectory import Trajectory, read_trajectories

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_tool"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


class BrokenTool(BaseTool):
    """A tool with a bug that shows in one session."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        if kwargs.get("broken"):
            raise RuntimeError("the disk is full")
        return instance_id or "i"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, float, dict]:
        return "4", 0.0, {}


class PayingTool(BaseTool):
    """Pays a quarter for every call, and two for the whole."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, float, dict]:
        return "4", 0.25, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 2.0


SHOWN = ToolSchema.model_validate(
    {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}
)


class ScriptedServers:
    """verl's server client in front of a scripted engine; it counts the turns that verl's client does not tell."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.turns: Counter[str] = Counter()
        self.started = asyncio.Event()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_for_our_server: Any
    ) -> TokenOutput:
        params = SamplingParams(
            max_new_tokens=sampling_params["max_tokens"], stop_token_ids=tuple(sampling_params["stop_token_ids"])
        )
        turn = self.turns[request_id]
        self.turns[request_id] += 1
        self.started.set()
        generation = await self.engine.generate(GenerationId(request_id, turn), prompt_ids, params)
        return TokenOutput(
            token_ids=list(generation.token_ids),
            log_probs=list(generation.logprobs or ()),
            stop_reason=generation.finish_reason.value,
            extra_fields={"global_steps": 4},
        )


class OwnServers:
    """The same for a worker in a process of its own: each has an engine that calls once and answers."""

    def __init__(self, model: Path, answer: str) -> None:
        self._model = model
        self._answer = answer
        self._servers: ScriptedServers | None = None

    async def generate(self, request_id: str, **given: Any) -> TokenOutput:
        if self._servers is None:
            engine = ScriptedEngine(HFChatTemplate.from_pretrained(self._model), two_turns(self._answer))
            self._servers = ScriptedServers(await engine.__aenter__())
        return await self._servers.generate(request_id, **given)


def demo_config(folder: Path, model: Path, tools: Path, *more: str) -> DictConfig:
    """verl's real configuration for the demo, with more overrides."""
    overrides = main_ppo_overrides(
        model=model,
        train=folder / "train.parquet",
        heldout=folder / "heldout.parquet",
        tools=tools,
        reward=EXAMPLE / "reward.py",
        run_dir=folder,
        steps=1,
        seed=1,
    )
    composed = _composed(tuple(one.replace(str(folder), ANY_FOLDER) for one in [*overrides, *more]))
    config = OmegaConf.create(_moved(OmegaConf.to_container(composed, resolve=False), str(folder)))
    OmegaConf.set_struct(config, True)
    return config


ANY_FOLDER = "/any/folder"


@functools.cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    """Takes a second, so once for all tests."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def _moved(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {key: _moved(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, folder) for item in value]
    return value.replace(ANY_FOLDER, folder) if isinstance(value, str) else value


def tool_yaml(folder: Path, tool: type[BaseTool] = BrokenTool, *, faults: Any = None, **rollout: Any) -> str:
    """A YAML with a tool, shown to the model as the calculator."""
    path = folder / f"{tool.__name__}.yaml"
    entry = {
        "class_name": f"{tool.__module__}.{tool.__name__}",
        "config": {},
        "tool_schema": SHOWN.for_template(),
        "faults": faults,
    }
    OmegaConf.save(OmegaConf.create({"tools": [entry], "rollout": rollout}), path)
    return str(path)


def v0_batch(rows: list[dict[str, Any]], *, validate: bool = False, step: int = 5) -> DataProto:
    """Rows as V0's trainer hands them to a worker."""
    columns = {key: np.array([row[key] for row in rows], dtype=object) for key in rows[0] if key != "raw_prompt"}
    columns["raw_prompt"] = np.fromiter((row["raw_prompt"] for row in rows), dtype=object, count=len(rows))
    return DataProto.from_dict(non_tensors=columns, meta_info={"global_steps": step, "validate": validate})


class RawWorker(AgentLoopWorker):  # type: ignore[misc]
    """verl's worker up to what the loop returned, which the V1 worker takes from there."""

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        return output


async def v1_session(
    worker: AgentLoopWorker, session_id: int = 0, *, sampling: Any = None, validate: bool = False, **row: Any
) -> Any:
    """One session as the V1 worker starts it (agent_loop_tq.py:113-121)."""
    info = {"step": 5, "sample_index": 0, "rollout_n": 0, "validate": validate}
    return await worker._run_agent_loop(
        dict(sampling or SAMPLING),
        info,
        agent_name="sglang_multiturn",
        trace=False,
        session_id=session_id,
        global_steps=5,
        **{**question(), **row},
    )


def question(uid: str = "u1") -> dict[str, Any]:
    return {
        "uid": uid,
        "index": 0,
        "raw_prompt": [{"role": "user", "content": "What is 2+2?"}],
        "data_source": "word_problems",
        "reward_model": {"ground_truth": "4"},
        "extra_info": {},
        "tools_kwargs": {},
    }


def scripted(template: HFChatTemplate, script: Script) -> ScriptedEngine:
    return ScriptedEngine(template, script)


def two_turns(answer: str) -> Script:
    return lambda generation_id, _ids: CALL if generation_id.turn == 0 else answer


def journal(folder: Path, files: str = "*") -> list[Trajectory]:
    """What the worker wrote down, in the order of its files."""
    return [line for path in sorted((folder / "journal").glob(f"{files}.jsonl")) for line in read_trajectories(path)]
