"""The rows: can they be read, do they name what is configured, do they bring what tools and rewards need."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from sglang_multiturn.config import closest
from sglang_multiturn.doctor.findings import Findings, Severity, note, problem
from sglang_multiturn.doctor.rows import Row, RowSample
from sglang_multiturn.doctor.subject import Subject
from sglang_multiturn.doctor.tally import Tally
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.rewards import gsm8k_score
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.verl_plugin.compat import LOOP_NAME

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate
    from sglang_multiturn.doctor.launch import Launch

_MEDIA_COLUMNS = ("images", "videos", "audios", "image", "video")
_PLACEHOLDERS = ("<image>", "<video>", "<audio>")


def check_rows(subject: Subject) -> Findings:
    """Everything that can be told without a tokenizer."""
    assert subject.rows is not None
    own_names = None if subject.launch is None else _own_names(subject.launch)
    tally = Tally(len(subject.rows.rows))
    for row in subject.rows.rows:
        _shape(row, tally)
        _agent_name(row, tally, own_names)
        if row.spec is not None:
            _messages(row, row.spec, tally)
            if subject.tools_complete:
                _tool_names(row, row.spec, subject.registry, tally)
            _tool_kwargs(row, row.spec, subject.registry, tally)
    yield from tally.findings()
    yield from _ground_truth(subject, subject.rows)
    yield from _never_given(subject.registry, subject.rows)
    yield from _duplicates(subject.rows)


def _shape(row: Row, tally: Tally) -> None:
    columns = [key for key in _MEDIA_COLUMNS if _is_filled(row.values.get(key))]
    text = "" if row.spec is None else "".join(message.text for message in row.spec.messages)
    if "image, video or audio" in row.error or (columns and any(mark in text for mark in _PLACEHOLDERS)):
        advice = "This version is text only: leave such rows out, or describe the picture in words."
        tally.add("data-media", Severity.PROBLEM, "the prompt holds an image, video or audio", advice, row.place)
    elif row.error:
        what = row.error.removeprefix(f"{row.place}: ")
        advice = "Correct the row; it would end as an error and train nothing."
        tally.add("data-row", Severity.PROBLEM, what, advice, row.place)


def _is_filled(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _own_names(launch: Launch) -> frozenset[str]:
    try:
        return launch.own_names
    except ConfigError:  # told by the launch's checks
        return frozenset({LOOP_NAME})


def _agent_name(row: Row, tally: Tally, own_names: frozenset[str] | None) -> None:
    """Without a launch (None) it is a note: only verl reads the column."""
    if "agent_name" not in row.values or row.values["agent_name"] in (own_names or {LOOP_NAME}):
        return
    advice = f"Drop the column, or write {LOOP_NAME!r} into it: it overrides default_agent_loop, row by row."
    severity = Severity.NOTE if own_names is None else Severity.PROBLEM
    what = f"agent_name is {row.values['agent_name']!r}: in verl another loop takes this row"
    tally.add("data-agent-name", severity, what, advice, row.place)


def _messages(row: Row, spec: RequestSpec, tally: Tally) -> None:
    last = spec.messages[-1]
    if last.role == "assistant":
        advice = "End the prompt with a user's message: the template opens a second assistant turn behind this one."
        tally.add(
            "data-last-message", Severity.PROBLEM, "the prompt ends with an assistant's message", advice, row.place
        )
    elif last.role in ("system", "developer"):
        advice = "Put the question into a user's message: most templates refuse a prompt without one."
        tally.add("data-last-message", Severity.NOTE, f"the prompt ends with a {last.role} message", advice, row.place)
    elif not last.text.strip():
        advice = "Leave the row out: the model is asked nothing."
        tally.add("data-empty-prompt", Severity.PROBLEM, f"the last {last.role} message is empty", advice, row.place)


def _tool_names(row: Row, spec: RequestSpec, registry: ToolRegistry, tally: Tally) -> None:
    for where, names in (("tool_selection", spec.tool_names or ()), ("tools_kwargs", tuple(spec.tools_kwargs))):
        if unknown := [name for name in names if name not in registry.names]:
            what = (
                f"extra_info.{where} names {unknown[0]!r}, which is not configured{closest(unknown[0], registry.names)}"
            )
            advice = "Give the tool YAML that has it (--tools), or correct the name: in verl it is left out without an error."
            tally.add("data-unknown-tool", Severity.PROBLEM, what, advice, row.place)


def _tool_kwargs(row: Row, spec: RequestSpec, registry: ToolRegistry, tally: Tally) -> None:
    for name in registry.names if spec.tool_names is None else spec.tool_names:
        if (tool := registry.get(name)) is None:
            continue
        kwargs = spec.tools_kwargs.get(name)
        given: Mapping[str, Any] = {} if kwargs is None else kwargs.create_kwargs
        if missing := _missing(tool.create, given):
            what = f"{name}.create needs {missing[0]!r}, and the row does not bring it"
            advice = f"Write it to extra_info.tools_kwargs.{name}.create_kwargs, or give the parameter a default."
            tally.add("data-create-kwargs", Severity.PROBLEM, what, advice, row.place)
        methods = ("create", "execute", "calc_reward", "release")
        for method in methods if kwargs is not None else ():
            if unknown := _unknown(getattr(tool, method), getattr(kwargs, f"{method}_kwargs")):
                what = f"{name}.{method} takes no {unknown[0]!r}, which the row's {method}_kwargs bring"
                advice = "Add **kwargs to the method, or leave the key out of the rows."
                tally.add("data-tool-kwargs", Severity.PROBLEM, what, advice, row.place)


def _ground_truth(subject: Subject, sample: RowSample) -> Findings:
    if subject.reward_fn is None:
        return
    readable = [row for row, spec in sample.readable if _is_missing(spec.ground_truth)]
    if not readable:
        return
    what = f"{len(readable):,} of {len(sample.rows):,} rows have no reward_model.ground_truth"
    advice = "Write it into every row; the reward function is called with ground_truth=None there."
    inner = subject.reward_fn.func if isinstance(subject.reward_fn, functools.partial) else subject.reward_fn
    needs_it = inner is gsm8k_score or len(readable) < len(sample.rows)
    yield (problem if needs_it else note)("data-ground-truth", what, advice, readable[0].place)


def _is_missing(truth: Any) -> bool:
    return truth is None or truth == ""


def _never_given(registry: ToolRegistry, sample: RowSample) -> Findings:
    """A parameter that `create` names and no row brings is mostly forgotten, default or not."""
    for name in registry.names:
        if (tool := registry.get(name)) is None:  # it is made in a process of its own
            continue
        wanted = {p.name for p in _named(tool.create) if p.default is not inspect.Parameter.empty}
        given = {
            key
            for _, spec in sample.readable
            if name in spec.tools_kwargs
            for key in spec.tools_kwargs[name].create_kwargs
        }
        if forgotten := sorted(wanted - given - {"create_kwargs"}):
            yield note(
                "data-create-kwargs",
                f"no row brings {', '.join(forgotten)}, which {name}.create takes",
                f"Write extra_info.tools_kwargs.{name}.create_kwargs if the tool needs it.",
            )


def _duplicates(sample: RowSample) -> Findings:
    seen: set[tuple[tuple[str, str], ...]] = set()
    repeated: list[Row] = []
    for row, spec in sample.readable:
        said = tuple((message.role, message.text) for message in spec.messages)
        repeated += [row] if said in seen else []
        seen.add(said)
    if repeated:
        what = f"{len(repeated):,} of {len(sample.rows):,} rows have the prompt of an earlier row"
        advice = "They count twice and form groups of their own; drop them unless you mean that."
        yield note("data-duplicates", what, advice, repeated[0].place)


def control_tokens(template: HFChatTemplate, sample: RowSample) -> Findings:
    """What users and tools say in the rows that looks like the template's own control tokens."""
    tally = Tally(len(sample.rows))
    for row, spec in sample.readable:
        for message in (m for m in spec.messages if m.role in ("user", "tool")):
            said = message.text
            if found := sorted((text for text in template.encoder.controls if text in said), key=said.index):
                what = (
                    f"a {message.role} says {', '.join(found[:5])}: encoded as plain characters, not as control tokens"
                )
                advice = "Right for quoted text. A control token that is meant belongs into the system message or the template."
                tally.add("data-control-tokens", Severity.NOTE, what, advice, row.place)
                break
    yield from tally.findings()


def _named(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters of a tool's method a row may bring."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind in kinds and p.name not in ("instance_id", "parameters")]


def _missing(create: Callable[..., Any], given: Collection[str]) -> list[str]:
    return [p.name for p in _named(create) if p.default is inspect.Parameter.empty and p.name not in given and p.name != "create_kwargs"]  # fmt: skip


def _unknown(method: Callable[..., Any], given: Collection[str]) -> list[str]:
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return []
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return [] if open_ended or "create_kwargs" in parameters else [key for key in given if key not in parameters]
