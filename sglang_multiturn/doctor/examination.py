"""The whole examination: what is loaded first, what is looked at then, and what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_multiturn.chat.parsers import make_parser
from sglang_multiturn.doctor import (
    budget_checks,
    cluster_checks,
    conversation,
    data_checks,
    environment_checks,
    launch_checks,
    model_checks,
    offer_checks,
    path_checks,
    template_checks,
    tool_checks,
)
from sglang_multiturn.doctor.conversation import Played
from sglang_multiturn.doctor.findings import Finding, Findings, Severity, isolated, note, ok, problem
from sglang_multiturn.doctor.launch import ROLLOUT, Launch
from sglang_multiturn.doctor.rows import read_sample
from sglang_multiturn.doctor.subject import Inputs, Subject
from sglang_multiturn.doctor.tokens_view import TokenView, view_tokens
from sglang_multiturn.errors import ConfigError, MissingDependencyError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The exact prompt of a row."""

    place: str
    tokens: tuple[TokenView, ...]


@dataclass(slots=True, kw_only=True)
class Examination:
    """Everything that is reported."""

    findings: list[Finding] = field(default_factory=list)
    prompt: Prompt | None = None
    played: Played | None = None
    took_s: float = 0.0

    @property
    def has_problem(self) -> bool:
        """Whether anything has to be mended."""
        return any(finding.severity is Severity.PROBLEM for finding in self.findings)

    def count(self, severity: Severity) -> int:
        """How many findings are of that severity."""
        return sum(finding.severity is severity for finding in self.findings)


def examine(inputs: Inputs) -> Examination:
    """Load what was named, look at all of it. Never raises for what is wrong with it: that is a finding."""
    started = time.monotonic()
    subject, result = Subject(inputs=inputs), Examination()

    def run(check: str, step: Callable[[], Iterable[Finding]]) -> None:
        result.findings += isolated(check, step)

    if inputs.overrides:
        run("launch-override", lambda: launch_checks.read_launch(subject))
    launch = subject.launch
    if (tools := _tools_of(subject)) is not None:
        run("tools-yaml", lambda: tool_checks.load_tools(subject, tools))
    if (model := _model_of(subject)) is not None:
        run("model-folder", lambda: model_checks.load_template(subject, model))
        run("model-config", lambda: _model_files(subject, model))
    run("data-file", lambda: _load_rows(subject))
    run("reward-function", lambda: path_checks.load_reward(subject))
    subject.settings = subject.tools_config.rollout
    if launch is not None:
        run("launch-settings", lambda: launch_checks.merge_launch_settings(subject, launch))
    run("tools-schema", lambda: tool_checks.check_tools(subject))
    run("reward-weights", lambda: path_checks.check_reward_weights(subject))
    if subject.rows is not None:
        run("data-row", lambda: data_checks.check_rows(subject))
    if subject.template is not None:
        _with_template(subject, result, run)
    if launch is not None:
        _with_launch(subject, launch, run)
    if inputs.ray or (launch is not None and cluster_checks.is_up()):
        run("cluster-node", lambda: cluster_checks.check_cluster(_files_of(subject)))
    result.took_s = time.monotonic() - started
    return result


Run = Callable[[str, Callable[[], Iterable[Finding]]], None]


def _with_template(subject: Subject, result: Examination, run: Run) -> None:
    template, rows = subject.template, subject.rows
    assert template is not None  # the caller looked
    run("template-traits", lambda: template_checks.template_traits(template, rows, with_tools=bool(subject.schemas)))
    run("tools-shown", lambda: offer_checks.what_is_shown(subject, template))
    run("calls-parser", lambda: _make_parser(subject))
    if (parser := subject.parser) is not None:
        run("calls-round-trip", lambda: offer_checks.what_comes_back(subject, template, parser))
    if rows is not None:
        run("data-control-tokens", lambda: data_checks.control_tokens(template, rows))
        run("budget-prompt", lambda: budget_checks.check_budgets(subject, template, rows))
    run("data-prompt", lambda: _show_prompt(subject, result))
    if parser is not None:
        run("conversation-run", lambda: _play(subject, result))


def _with_launch(subject: Subject, launch: Launch, run: Run) -> None:
    from sglang_multiturn.verl_plugin.launch import refuse_as_verl

    def refused() -> Findings:
        try:
            refuse_as_verl(launch.config)
        except ConfigError as error:
            yield problem("launch-refused", str(error), "verl would end with this before training starts.")

    run("launch-loop", lambda: launch_checks.check_loop(launch))
    run("launch-engine", lambda: launch_checks.check_engine(launch))
    run("launch-sampling", lambda: launch_checks.check_sampling(launch))
    run("launch-default", lambda: launch_checks.check_multi_turn(launch, subject.settings))
    run("launch-context", lambda: launch_checks.check_lengths(subject, launch))
    run("launch-history", lambda: launch_checks.check_trainer(subject, launch))
    run("launch-other", lambda: launch_checks.check_agreement(subject, launch))
    run("launch-path", lambda: path_checks.check_paths(subject, launch))
    run("launch-reward", lambda: path_checks.check_scoring(launch, subject.settings))
    if (tools := _tools_of(subject)) is not None:
        run("launch-loader", lambda: path_checks.check_loader(str(tools)))
    run("launch-refused", refused)
    run("environment-versions", lambda: _environment(launch))


def _environment(launch: Launch) -> Findings:
    yield from environment_checks.check_versions(environment_checks.installed_versions())
    yield from environment_checks.check_trl(environment_checks.installed_trl(), launch)
    missing = list(
        environment_checks.check_plugin(environment_checks.installed_plugins(), environment_checks.plugin_policy())
    )
    yield from missing or environment_checks.check_registered()


def _model_files(subject: Subject, model: str) -> Findings:
    if (template := subject.template) is not None:
        yield from model_checks.ends_of_turn(template, model)
        yield from model_checks.embedding_size(subject, template, model)


def _model_of(subject: Subject) -> str | None:
    launched = subject.launch and subject.launch.get("actor_rollout_ref.model.path")
    return subject.inputs.model or (str(launched) if launched else None)


def _tools_of(subject: Subject) -> Path | None:
    launched = subject.launch and subject.launch.get(f"{ROLLOUT}.multi_turn.tool_config_path")
    return subject.inputs.tools or (Path(launched) if launched else None)


def _files_of(subject: Subject) -> list[str]:
    """What workers on other nodes open, as it was named."""
    launched = [] if subject.launch is None else path_checks.launched_files(subject.launch)
    return sorted({*launched, *([] if subject.inputs.tools is None else [str(subject.inputs.tools)])})


def _load_rows(subject: Subject) -> Findings:
    paths = subject.inputs.data or _launched_data(subject)
    if not paths:
        return
    key = None if subject.launch is None else str(subject.launch.get("data.prompt_key"))
    asked = subject.inputs.row
    sample, findings = read_sample(paths, prompt_key=key, most=subject.inputs.max_rows, asked=asked)
    subject.rows = sample if sample.rows else None
    yield from findings
    if subject.shown_row is not None and subject.shown_row.index != asked:
        what = (
            f"row {asked} (counted from 0) cannot be shown, since it is not there or no conversation: the first one is"
        )
        yield note("data-row", what, "Give another --row.", subject.shown_row.place)
    without = [row for row in sample.rows if key is not None and row.values.get(key) is None]
    if without:
        what = f"{len(without):,} of {len(sample.rows):,} rows have no column {key!r}, where verl reads the messages"
        yield problem("data-prompt-key", what, "Rename the column, or set data.prompt_key.", without[0].place)


def _launched_data(subject: Subject) -> tuple[Path, ...]:
    """The files the launch names, those that are on this machine."""
    if subject.launch is None:
        return ()
    named = [*subject.launch.files("data.train_files"), *subject.launch.files("data.val_files")]
    return tuple(path for name in dict.fromkeys(named) if (path := Path(name).expanduser()).is_file())


def _make_parser(subject: Subject) -> Findings:
    template, name = subject.template, subject.settings.tool_parser
    assert template is not None  # the caller looked
    try:
        subject.parser = make_parser(name, template)
    except (ConfigError, MissingDependencyError) as error:
        advice = "Name a parser under `rollout:` of the tool YAML: tool_parser: ..."
        yield (problem if subject.schemas else note)("calls-parser", str(error), advice)
        return
    said = f"auto, which is {template.tool_call_format}" if name == "auto" else name
    yield ok("calls-parser", f"calls are read by the parser {said}")


def _show_prompt(subject: Subject, result: Examination) -> Findings:
    row, template = subject.shown_row, subject.template
    assert template is not None  # the caller looked
    if row is None or row.spec is None:
        return iter(())
    ids = template.encode_prompt(row.spec.messages, budget_checks.offered(subject, row.spec))
    result.prompt = Prompt(place=row.place, tokens=view_tokens(template, ids))
    return iter(())


def _play(subject: Subject, result: Examination) -> Findings:
    assert subject.template is not None  # the caller looked
    assert subject.parser is not None
    result.played, findings = conversation.play(subject, subject.template, subject.parser)
    return findings
