"""What one worker process of verl keeps for all its conversations, and how it runs one.

verl makes a new loop object for every conversation (agent_loop.py:683). Registry, proved template, merged settings,
reward function and journals are made once a worker instead, and found again by `context_of`. `readings` reads verl's
configuration, `row_keeping` says what a finished conversation leaves verl.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from sglang_multiturn.chat.parsers import make_parser
from sglang_multiturn.conversation.context import RolloutContext
from sglang_multiturn.errors import ConfigError, DataError, SglangMultiturnError
from sglang_multiturn.request import (
    AsyncRolloutRequest,
    Disposition,
    ErrorRecord,
    RequestSpec,
    RequestState,
    StopReason,
)
from sglang_multiturn.rollout import Rollout
from sglang_multiturn.run_folder.in_flight_writer import InFlightWriter
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.tools.runtime import ToolRuntime
from sglang_multiturn.trajectory import Trajectory
from sglang_multiturn.verl_plugin import readings
from sglang_multiturn.verl_plugin.compat import LoadedTools, registry_of
from sglang_multiturn.verl_plugin.generator import VerlGenerator
from sglang_multiturn.verl_plugin.journals import WorkerJournals
from sglang_multiturn.verl_plugin.purpose import Purpose, told_purpose
from sglang_multiturn.verl_plugin.requests import RequestNames, plain, request_spec
from sglang_multiturn.verl_plugin.row_keeping import RowKeeper
from sglang_multiturn.verl_plugin.rows import RowOutput, RowRules
from sglang_multiturn.verl_plugin.seeds import Seeds
from sglang_multiturn.verl_plugin.settings import (
    merge_settings,
    refuse_leaking_faults,
    sampling_keys,
    validation_settings,
)
from sglang_multiturn.verl_plugin.tracing import TracedRuntime, is_traced

logger = logging.getLogger(__name__)


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
            readings.refuse_split(config)
        registry = registry_of(tools)
        if told_purpose() is None:
            refuse_leaking_faults(config, registry)
        self.generator = VerlGenerator(
            server_manager,
            rollout_name=rollout.name,
            with_logprobs=bool(rollout.calculate_log_probs),
            skip_tokenizer_init=bool(rollout.get("skip_tokenizer_init", True)),
        )
        folder = Path(self.settings.journal_dir) if self.settings.journal_dir is not None else None
        self._journals = WorkerJournals(folder, fsync=self.settings.journal_fsync)
        self._in_flight = InFlightWriter(folder, "worker", self.in_flight) if folder is not None else None
        self._running: set[Rollout] = set()
        self.rollout = self._rollout_context(config, tokenizer, registry)
        self.validation = dataclasses.replace(
            self.rollout,
            config=validation_settings(self.settings, has_reward_fn=self.rollout.reward_fn is not None),
        )
        self._names = RequestNames()
        self._seeds = Seeds(rollout)
        self._val_sampling = sampling_keys(rollout.val_kwargs)
        self._train_sampling = sampling_keys(rollout)
        self._keeper = RowKeeper(self._row_rules(config), group_size=readings.filtered_group_size(config))

    def _rollout_context(self, config: Any, tokenizer: Any, registry: ToolRegistry) -> RolloutContext:
        template = readings.chat_template(config, tokenizer)
        runtime = TracedRuntime if is_traced() else ToolRuntime
        return RolloutContext(
            generator=self.generator,
            template=template,
            tools=registry,
            tool_runtime=runtime(registry, self.settings, run_id=_run_id(), marks=self._journals),
            parser=make_parser(self.settings.tool_parser, template),
            config=self.settings,
            max_model_len=readings.max_model_len(config),
            reward_fn=readings.reward_function(config),
        )

    def _row_rules(self, config: Any) -> RowRules:
        rollout = config.actor_rollout_ref.rollout
        return RowRules(
            scored_here=readings.scores_here(config, self.settings, self.rollout.reward_fn),
            with_logprobs=bool(rollout.calculate_log_probs),
            max_prompt_tokens=int(rollout.prompt_length),
            filler_id=self.rollout.template.stop_token_ids[0],
            settings=self.settings,
            validation_settings=self.validation.config,
            unscored_extra=readings.filter_metric(config),
        )

    def in_flight(self) -> Iterable[AsyncRolloutRequest]:
        """The conversations that run at this moment; called from other threads too."""
        return [rollout.request for rollout in self._running]

    async def run(self, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> list[RowOutput] | RowOutput:
        """One conversation of verl's, as rows: a list for the V1 worker, exactly one for any other."""
        takes_rows = "session_id" in row  # only the V1 worker passes it (agent_loop_tq.py:116): any number, also none
        if self.settings.history == "split" and not takes_rows:
            raise ConfigError(f"history: split: {readings.ONE_ROW}")
        purpose = told_purpose() or self._guessed_purpose(sampling_params, row)
        try:
            spec = request_spec(
                row,
                names=self._names,
                sampling=readings.sampling_of(sampling_params),
                known_tools=self.rollout.tools.names,
                validate=purpose.validate,
                step=purpose.step,
                sample_index=purpose.sample_index,
            )
            spec = self._seeds.seeded(spec)
            trajectory = await self._roll_out(spec)
            await self.generator.settle(spec.request_id)
        except DataError as error:
            logger.error("%s", error)
            trajectory = failed_row(row, error, purpose)
        self._journals.write(trajectory)
        span = self.generator.take_span(trajectory.request_id)
        rows = self._keeper.rows(trajectory, span, takes_rows=takes_rows)
        return rows if takes_rows else rows[0]

    async def _roll_out(self, spec: RequestSpec) -> Trajectory:
        rollout = Rollout(spec, self.validation if spec.validate else self.rollout)
        self._running.add(rollout)
        self._journals.begin(spec)
        if self._in_flight is not None:
            self._in_flight.start()
        try:
            return await rollout.run()
        finally:
            self._running.discard(rollout)
            if not self._running:  # this worker's batch is over
                assert self.rollout.tool_runtime is not None  # made with the context
                self.rollout.tool_runtime.report_leaks()

    def _guessed_purpose(self, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> Purpose:
        """Where verl did not tell: what it samples with does, unless validation samples as training does."""
        given = sampling_keys(sampling_params)
        validate = given == self._val_sampling and given != self._train_sampling
        return Purpose(validate=validate, step=int(row.get("global_steps", 0)))


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


def failed_row(row: Mapping[str, Any], error: Exception, purpose: Purpose) -> Trajectory:
    """What stands for a row that is no conversation."""
    uid = str(row.get("uid") or row.get("index", ""))
    return Trajectory(
        request_id=f"{uid}-unreadable-{uuid4().hex[:8]}",
        uid=uid,
        sample_index=int(row.get("session_id", purpose.sample_index)),
        input_index=0,
        state=RequestState.FAILED,
        stop_reason=StopReason.ERROR,
        disposition=Disposition.DROP,
        segments=(),
        turns=(),
        messages=(),
        error=ErrorRecord.of(error),
        validate=purpose.validate,
        step=purpose.step,
    )


def _run_id() -> str:
    """Names the run to all its workers, which share the limits of its tools."""
    import ray

    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else "run"
