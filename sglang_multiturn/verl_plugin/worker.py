"""What one worker process of verl keeps for all its conversations.

verl makes a new loop object for every conversation (agent_loop.py:683). Registry, proved template, merged settings,
reward function, journal and the counting of groups are made once a worker instead, and found again by `context_of`.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.chat.parsers import make_parser
from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.context import RolloutContext
from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.errors import ConfigError, DataError, SglangMultiturnError
from sglang_multiturn.failures import FailureLog
from sglang_multiturn.journal import JournalWriter
from sglang_multiturn.request import Disposition, ErrorRecord, RequestSpec, RequestState, StopReason
from sglang_multiturn.rewards import RewardFn, counts_tools
from sglang_multiturn.rollout import run_one
from sglang_multiturn.tools.runtime import ToolRuntime
from sglang_multiturn.trajectory import Trajectory
from sglang_multiturn.verl_plugin.compat import LoadedTools, registry_of
from sglang_multiturn.verl_plugin.generator import VerlGenerator
from sglang_multiturn.verl_plugin.requests import RequestNames, plain, request_spec
from sglang_multiturn.verl_plugin.rows import RowOutput, RowRules, masked_row, training_rows, version_span
from sglang_multiturn.verl_plugin.settings import (
    CONTEXT_RESERVE_TOKENS,
    merge_settings,
    refuse_leaking_faults,
    sampling_keys,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GroupCount:
    """How many sessions of a prompt have ended in this worker, and how many left a row.

    V1 runs all sessions of a prompt in one worker (agent_loop_tq.py:113), so the last one knows that the group is empty.
    """

    size: int
    ended: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    def is_empty_after(self, uid: str, *, kept: bool) -> bool:
        """Count one session; True when it was the group's last and none left a row."""
        self.ended[uid] += 1
        self.kept[uid] += kept
        if self.ended[uid] < self.size:
            return False
        del self.ended[uid]
        return self.kept.pop(uid) == 0


class WorkerContext:
    """Everything that outlives a conversation in one worker process."""

    def __init__(
        self, config: Any, server_manager: Any, tokenizer: Any, tools: list[Any], entry: Mapping[str, Any]
    ) -> None:
        """Raises ConfigError: a setting is wrong; TemplateError: the model's template cannot be proved."""
        rollout = config.actor_rollout_ref.rollout
        yaml_settings = tools.config.rollout if isinstance(tools, LoadedTools) else None
        self.settings = merge_settings(rollout, yaml_settings, entry)
        if self.settings.history == "split":
            refuse_split(config)
        self.generator = VerlGenerator(
            server_manager,
            rollout_name=rollout.name,
            with_logprobs=bool(rollout.calculate_log_probs),
            skip_tokenizer_init=bool(rollout.get("skip_tokenizer_init", True)),
        )
        template = chat_template(config, tokenizer)
        reward_fn = reward_function(config)
        registry = registry_of(tools)
        refuse_leaking_faults(config, registry)
        self._tools = ToolRuntime(registry, self.settings, run_id=_run_id())
        self._in_flight = 0
        self.rollout = RolloutContext(
            generator=self.generator,
            template=template,
            tools=registry,
            tool_runtime=self._tools,
            parser=make_parser(self.settings.tool_parser, template),
            config=self.settings,
            max_model_len=max_model_len(config),
            reward_fn=reward_fn,
        )
        self.rules = RowRules(
            scored_here=scores_here(config, self.settings, reward_fn),
            with_logprobs=bool(rollout.calculate_log_probs),
            max_prompt_tokens=int(rollout.prompt_length),
            filler_id=template.stop_token_ids[0],
            settings=self.settings,
            unscored_extra=_filter_metric(config),
        )
        self._names = RequestNames()
        self._val_sampling = sampling_keys(rollout.val_kwargs)
        self._train_sampling = sampling_keys(rollout)
        self._groups = GroupCount(int(rollout.n)) if _filters_groups(config) else None
        self._journal = _journal(self.settings.journal_dir)
        self.dropped: Counter[str] = Counter()
        self.masked: Counter[str] = Counter()
        self.failures = FailureLog()

    async def run(self, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> list[RowOutput] | RowOutput:
        """One conversation of verl's, as rows: a list for the V1 worker, exactly one for any other."""
        takes_rows = "session_id" in row  # only the V1 worker passes it (agent_loop_tq.py:116): any number, also none
        if self.settings.history == "split" and not takes_rows:
            raise ConfigError(f"history: split: {_ONE_ROW}")
        spec: RequestSpec | None = None
        try:
            spec = request_spec(
                row,
                names=self._names,
                sampling=_sampling(sampling_params),
                known_tools=self.rollout.tools.names,
                validate=self._is_validation(sampling_params),
            )
            trajectory = await self._roll_out(spec)
            await self.generator.settle(spec.request_id)
        except DataError as error:
            logger.error("%s", error)
            trajectory = failed_row(row, error)
        self._write(trajectory)
        self._say_what_failed(trajectory)
        rows = self._rows(trajectory, takes_rows=takes_rows, step=int(row.get("global_steps", 1)))
        return rows if takes_rows else rows[0]

    async def _roll_out(self, spec: RequestSpec) -> Trajectory:
        self._in_flight += 1
        try:
            return await run_one(spec, self.rollout)
        finally:
            self._in_flight -= 1
            if not self._in_flight:  # this worker's batch is over
                self._tools.report_leaks()

    def _rows(self, trajectory: Trajectory, *, takes_rows: bool, step: int) -> list[RowOutput]:
        """What verl gets. A dropped trajectory leaves no row where verl can do without."""
        span = self.generator.take_span(trajectory.request_id)
        # Rollouts of step n are sampled by the weights of step n-1 (trainer_base.py:1758).
        known = [version for row in trajectory.rows for version in row.response_weight_versions]
        versions = span or version_span(known, unknown=max(0, step - 1))
        kept = self._is_kept(trajectory)
        group_is_empty = (
            self._groups is not None
            and takes_rows
            and not trajectory.validate
            and self._groups.is_empty_after(trajectory.uid, kept=kept)
        )
        if kept:
            return training_rows(trajectory, self.rules, versions=versions, user_extra=takes_rows)
        reason = trajectory.stop_reason.value
        if takes_rows and self.settings.failed_rows == "drop" and not group_is_empty:
            self._count(self.dropped, reason, "dropped: no row, its group is smaller by one")
            return []
        self._count(
            self.masked, reason, "kept as a masked row of reward 0, which shifts its group's mean and deviation"
        )
        return [masked_row(trajectory, self.rules, versions=versions, user_extra=takes_rows)]

    def _is_kept(self, trajectory: Trajectory) -> bool:
        if trajectory.disposition is Disposition.DROP:
            return False
        if self.rules.with_logprobs and any(row.response_logprobs is None for row in trajectory.rows):
            logger.error("request %s: verl's server sent no log-probabilities; dropped", trajectory.request_id)
            return False
        return True

    @staticmethod
    def _count(counter: Counter[str], reason: str, what: str) -> None:
        counter[reason] += 1
        if _is_told(count := counter[reason]):
            logger.warning("%d trajectories ended as %s in this worker; %s", count, reason, what)

    def _say_what_failed(self, trajectory: Trajectory) -> None:
        for failure, count in self.failures.add(trajectory):
            if count == 1:
                logger.warning("the first %s in this worker: %s", failure.kind, failure)
            elif _is_told(count):
                logger.warning("%d times %s in this worker by now", count, failure.kind)

    def _is_validation(self, sampling_params: Mapping[str, Any]) -> bool:
        """verl does not tell a loop; what it samples with does, unless validation samples as training does."""
        given = sampling_keys(sampling_params)
        return given == self._val_sampling and given != self._train_sampling

    def _write(self, trajectory: Trajectory) -> None:
        if self._journal is None:
            return
        try:
            self._journal.write(trajectory)
        except (OSError, ValueError) as error:  # a full disk; something a tool returned that JSON has no word for
            logger.error("request %s: the journal cannot be written: %s", trajectory.request_id, error)


_CONTEXTS: dict[tuple[int, str], tuple[Any, WorkerContext | SglangMultiturnError]] = {}


def context_of(
    config: Any, server_manager: Any, tokenizer: Any, tools: list[Any], entry: Mapping[str, Any]
) -> WorkerContext:
    """The worker's context: one for each server client (a worker has one) and set of extra keys.

    Raises:
        SglangMultiturnError: what was wrong the first time, in every conversation.
    """
    key = (id(server_manager), json.dumps(plain(entry), sort_keys=True, default=str))
    if key not in _CONTEXTS:
        made: WorkerContext | SglangMultiturnError
        try:
            made = WorkerContext(config, server_manager, tokenizer, tools, entry)
        except SglangMultiturnError as error:
            made = error
        # The client is kept beside it: while it lives, no other object has its id.
        _CONTEXTS[key] = (server_manager, made)
    context = _CONTEXTS[key][1]
    if isinstance(context, SglangMultiturnError):
        raise context
    return context


def failed_row(row: Mapping[str, Any], error: Exception) -> Trajectory:
    """What stands for a row that is no conversation."""
    uid = str(row.get("uid") or row.get("index", ""))
    return Trajectory(
        request_id=f"{uid}-unreadable-{uuid4().hex[:8]}",
        uid=uid,
        sample_index=int(row.get("session_id", 0)),
        input_index=0,
        state=RequestState.FAILED,
        stop_reason=StopReason.ERROR,
        disposition=Disposition.DROP,
        segments=(),
        turns=(),
        messages=(),
        error=ErrorRecord.of(error),
    )


def chat_template(config: Any, tokenizer: Any) -> HFChatTemplate:
    """The template of verl's own tokenizer, with the ends that the model's generation config names."""
    from transformers import GenerationConfig
    from verl.utils.fs import copy_to_local

    try:
        ends = GenerationConfig.from_pretrained(copy_to_local(config.actor_rollout_ref.model.path)).eos_token_id
    except OSError:
        ends = None  # a model need not have one
    return HFChatTemplate(
        tokenizer,
        stop_token_ids=[ends] if isinstance(ends, int) else ends or (),
        chat_template_kwargs=plain(config.data.get("apply_chat_template_kwargs") or {}),
    )


_ONE_ROW = "this trainer takes one row a conversation; set trainer.use_v1=true (verl's V1 trainer takes several), or history: keep"
_COUNTS_SESSIONS_ONCE = frozenset({"grpo", "gae", "reinforce_plus_plus"})
"""Advantages that several rows of a session do not skew: V1 groups by session for the first (v1/utils.py:170), the
others compare no rows of a group with each other."""


def refuse_split(config: Any) -> None:
    """Raises ConfigError where `history: split` would fail or skew the advantages of a group."""
    if not (config.get("trainer") or {}).get("use_v1", False):
        raise ConfigError(f"history: split: {_ONE_ROW}")
    estimator = str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator))
    if estimator not in _COUNTS_SESSIONS_ONCE:
        raise ConfigError(
            f"history: split: algorithm.adv_estimator={estimator} compares all rows of a prompt, so that a conversation "
            f"of several rows would count several times; use {', '.join(sorted(_COUNTS_SESSIONS_ONCE))}, or history: keep"
        )


_PLAIN_MANAGER = ("register", "naive")
"""verl's reward manager that does no more than to call the reward function."""


def reward_function(config: Any) -> RewardFn | None:
    """The user's `reward.custom_reward_function`, loaded by verl, where calling it here is all that scoring is.

    A reward model, or a reward manager that does more than to call the function (`dapo` adds a length penalty), stays
    verl's: rows then have no reward and verl scores them, from the text of the whole row.
    """
    from verl.trainer.ppo.reward import get_custom_reward_fn

    reward = config.reward
    if not (reward.get("custom_reward_function") or {}).get("path"):
        return None
    manager = reward.reward_manager
    if reward.reward_model.enable or (manager.source, manager.name) != _PLAIN_MANAGER:
        logger.warning(
            "verl scores this run (reward model or reward manager %r): its scorer reads tool answers as the model's words",
            manager.name,
        )
        return None
    reward_fn: RewardFn | None = get_custom_reward_fn(config)
    return reward_fn


def scores_here(config: Any, settings: RolloutConfig, reward_fn: RewardFn | None) -> bool:
    """Whether rows leave this package with a reward. verl scores only rows that have none.

    Raises:
        ConfigError: what tools say is to count, and so is a scorer of verl's that would not be asked.
    """
    if reward_fn is not None:
        return True
    if not counts_tools(settings):
        return False
    reward = config.reward
    if reward.reward_model.enable or (reward.reward_manager.source, reward.reward_manager.name) != _PLAIN_MANAGER:
        raise ConfigError(
            "step_rewards and calc_rewards cannot be added to what verl's reward model or its reward manager "
            f"{reward.reward_manager.name!r} say; set both to off, or use reward.custom_reward_function with the manager naive"
        )
    logger.warning("the reward is step_rewards and calc_rewards alone; reward.custom_reward_function would add a score")
    return True


def max_model_len(config: Any) -> int:
    """Prompt and response together, as verl's servers take it (async_sglang_server.py:167), less the reserve."""
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    rollout = config.actor_rollout_ref.rollout
    longest = rollout.max_model_len
    if longest is None:
        model = config.actor_rollout_ref.model
        hf_config = AutoConfig.from_pretrained(
            copy_to_local(model.path), trust_remote_code=bool(model.get("trust_remote_code", False))
        )
        longest = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if longest is None:
        return int(rollout.prompt_length + rollout.response_length)
    return int(longest) - CONTEXT_RESERVE_TOKENS


def _is_told(count: int) -> bool:
    """Whether this is the 1st, 2nd, 4th, 8th, ... of its kind."""
    return count & (count - 1) == 0


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    stop = given.get("stop") or ()
    return SamplingParams(
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=int(given.get("top_k", -1)),
        min_p=float(given.get("min_p", 0.0)),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.get("stop_token_ids") or ()),
    )


def _filters_groups(config: Any) -> bool:
    """Whether V1's DAPO filter runs: it raises on a group without any row (replay_buffer.py:299)."""
    filter_groups = config.algorithm.get("filter_groups") or {}
    return bool(filter_groups.get("enable", False))


def _filter_metric(config: Any) -> tuple[str, ...]:
    """The key of `reward_extra_info` the DAPO filter reads on every row; `reward` is no such key."""
    metric = (config.algorithm.get("filter_groups") or {}).get("metric") if _filters_groups(config) else None
    return (str(metric),) if metric and metric != "reward" else ()


def _run_id() -> str:
    """Names the run to all its workers, which share the limits of its tools."""
    import ray

    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else "run"


def _journal(folder: str | None) -> JournalWriter | None:
    return None if folder is None else JournalWriter(Path(folder) / f"worker-{os.getpid()}-{uuid4().hex[:8]}.jsonl")
