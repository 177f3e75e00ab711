"""A standalone run, from what was asked to its summary. Everything is read and checked before anything starts."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import RolloutConfig, ToolsConfig
from sglang_multiturn.dataset import in_groups, read_rows, spec_from_row
from sglang_multiturn.engine.base import Engine
from sglang_multiturn.errors import BatchFailedError, ConfigError, SglangMultiturnError
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.rewards import RewardFn, check_weights, load_reward_fn
from sglang_multiturn.run_folder.asked import Asked, EngineName, RunOptions
from sglang_multiturn.run_folder.folder import RunFolder
from sglang_multiturn.run_folder.in_flight_writer import InFlightWriter
from sglang_multiturn.run_folder.view import how_to_go_on, print_summary, progress, resumed_lines, say
from sglang_multiturn.runner import RolloutEngine
from sglang_multiturn.summary import RunSummary
from sglang_multiturn.tools.registry import ToolRegistry

_STOPPED_BY = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Signals that end a run in good order, and the exit codes a shell expects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that was read completely, and nothing of it started."""

    options: RunOptions
    config: RolloutConfig
    registry: ToolRegistry
    specs: Sequence[RequestSpec]
    reward_fn: RewardFn | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What rolls out."""

    engine: Engine
    template: ChatTemplate
    specs: Iterator[RequestSpec]
    """What is left to do."""


def new_run(options: RunOptions, out: Path, *, overwrite: bool) -> int:
    """Begin a run in `out` and see it to its end; returns the exit code. Raises SglangMultiturnError."""
    prepared = prepare(options)
    parts = make_parts(prepared, prepared.specs, seed=options.seed)
    asked = Asked.new(options, len(prepared.specs))
    with RunFolder.begin(out, asked, overwrite=overwrite, fsync=prepared.config.journal_fsync) as folder:
        return _Work(folder, prepared, RunSummary()).do(parts)


def resume_run(out: Path, given: Mapping[str, Any], *, retry_failed: bool) -> int:
    """Go on with the run in `out`, with the options that were `given` this time; returns the exit code.

    Raises:
        ConfigError: there is no run, another process works on it, or what it was asked has changed.
        SglangMultiturnError: as `new_run`.
    """
    asked = Asked.read(out).with_options(given, out)
    prepared = prepare(asked.options)
    if len(prepared.specs) != asked.rollouts:
        raise ConfigError(f"--resume {out}: {len(prepared.specs)} rollouts are asked now, {asked.rollouts} were then")
    with RunFolder.reopen(out, asked, fsync=prepared.config.journal_fsync) as folder:
        stock = folder.take_stock(prepared.specs, retry_failed=retry_failed)
        say(resumed_lines(stock, folder.asked, out))
        work = _Work(folder, prepared, stock.summary)
        if not stock.left:
            work.finish()
            return 0
        return work.do(make_parts(prepared, stock.left, seed=folder.engine_seed))


def prepare(options: RunOptions) -> Prepared:
    """Read tools, rows and reward function. Raises ConfigError; DataError."""
    tools_config = ToolsConfig.from_yaml(options.tools) if options.tools else ToolsConfig()
    config = options.config(tools_config.rollout)
    registry = ToolRegistry.from_config(tools_config, options.tools or "tools")
    check_weights(config, registry.names)
    return Prepared(
        options=options,
        config=config,
        registry=registry,
        specs=_read_specs(options, registry),
        reward_fn=load_reward_fn(options.reward) if options.reward else None,
    )


def make_parts(prepared: Prepared, specs: Sequence[RequestSpec], *, seed: int) -> Parts:
    """Engine and template for these requests; nothing is started. Raises ConfigError; TemplateError."""
    options = prepared.options
    template = _template(options)
    if options.engine is EngineName.SCRIPTED:
        from sglang_multiturn.engine.scripted import ScriptedEngine
        from sglang_multiturn.engine.scripts import PlannedScript, load_plan

        planned = PlannedScript(load_plan(options.script, prepared.registry.schemas()), template)
        return Parts(engine=ScriptedEngine(template, planned), template=template, specs=planned.watch(specs))
    from sglang_multiturn.engine.sglang_engine import SGLangEngine

    assert options.model is not None  # _template saw to it
    return Parts(engine=SGLangEngine(options.model, random_seed=seed), template=template, specs=iter(specs))


class _Work:
    """This process's part of a run."""

    def __init__(self, folder: RunFolder, prepared: Prepared, summary: RunSummary) -> None:
        self._folder = folder
        self._prepared = prepared
        self._summary = summary
        self._finished_before = summary.rollouts
        self._started_s = time.monotonic()

    def do(self, parts: Parts) -> int:
        """Roll out what is left; returns the exit code."""
        stop = _Stop()
        with self._saying_how_to_go_on():
            try:
                asyncio.run(self._roll_out(parts, stop))
            except (KeyboardInterrupt, asyncio.CancelledError):
                if stop.signal is None:
                    raise
                self._folder.stop(self._wall_s)
                say([f"stopped by {stop.signal.name}. {self._how_to_go_on()}"])
                return _STOPPED_BY[stop.signal]
        self.finish()
        return 0

    def finish(self) -> None:
        """Write and print the summary of the whole run."""
        wall_s = self._folder.finish(self._summary, self._wall_s)
        print_summary(self._summary, wall_s, self._folder.journal_path)

    async def _roll_out(self, parts: Parts, stop: _Stop) -> None:
        rollouts = RolloutEngine(
            parts.engine,
            template=parts.template,
            tools=self._prepared.registry,
            config=self._prepared.config,
            reward_fn=self._prepared.reward_fn,
            journal=self._folder.journal,
        )
        with stop.at_a_signal(), progress(self._summary, self._folder.asked.rollouts) as advance:
            async with rollouts:
                with InFlightWriter(self._folder.path, "rollout", rollouts.in_flight):
                    async for trajectory in rollouts.run(parts.specs):
                        self._summary.add(trajectory)
                        advance()
                self._summary.held = rollouts.held_by_tools()

    @contextmanager
    def _saying_how_to_go_on(self) -> Iterator[None]:
        try:
            yield
        except SglangMultiturnError as error:
            self._folder.stop(self._wall_s)
            if not self._finished:
                raise
            again = (
                "\n\nAdd --retry-failed to ask those that FAILED again." if isinstance(error, BatchFailedError) else ""
            )
            raise type(error)(f"{error}\n\n{self._how_to_go_on()}{again}") from error
        except Exception:
            say([self._how_to_go_on()])
            raise

    def _how_to_go_on(self) -> str:
        return how_to_go_on(self._finished, self._folder.asked.rollouts, self._folder.path)

    @property
    def _finished(self) -> int:
        return self._finished_before + self._folder.journal.written

    @property
    def _wall_s(self) -> float:
        return time.monotonic() - self._started_s


class _Stop:
    """Ctrl-C or SIGTERM ends the run in good order: what runs is ended, its tools released. A second one ends it at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @contextmanager
    def at_a_signal(self) -> Iterator[None]:
        """Cancel the task that enters, when a signal comes. Not in threads, where Python has no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int, _frame: FrameType | None) -> None:
            self.signal = signal.Signals(number)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            say(["stopping: what runs is ended and its tools are released; once more to stop at once"])
            loop.call_soon_threadsafe(task.cancel)

        before = {number: signal.signal(number, stop) for number in _STOPPED_BY}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _read_specs(options: RunOptions, registry: ToolRegistry) -> list[RequestSpec]:
    specs = []
    for index, (place, row) in enumerate(read_rows(options.data)):
        if index == options.limit:
            break
        uid = str(index)
        spec = spec_from_row(row, place=place, request_id=uid, uid=uid, input_index=index, sampling=options.sampling)
        registry.check_row(spec, place)  # a row that names a tool nobody configured is found before anything runs
        specs.append(spec)
    return list(in_groups(specs, options.samples))


def _template(options: RunOptions) -> ChatTemplate:
    if options.model is not None:
        from sglang_multiturn.chat.hf_template import HFChatTemplate

        return HFChatTemplate.from_pretrained(options.model)
    if options.engine is EngineName.SGLANG:
        raise ConfigError("--engine sglang needs --model; for a dry run without one use --engine scripted")
    from sglang_multiturn.chat.byte_chatml import ByteChatML

    return ByteChatML()
