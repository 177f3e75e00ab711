"""Tokens: how long prompts are, and what is left for answers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_multiturn.doctor.findings import Findings, Severity, note, ok, problem
from sglang_multiturn.doctor.rows import Row, RowSample
from sglang_multiturn.doctor.subject import Subject
from sglang_multiturn.doctor.tally import Tally
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.schemas import ToolSchema

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate


@dataclass(frozen=True, slots=True)
class _Length:
    row: Row
    tokens: int


def check_budgets(subject: Subject, template: HFChatTemplate, sample: RowSample) -> Findings:
    """Encode every row that is looked at and compare with the limits."""
    tally = Tally(len(sample.rows))
    lengths: list[_Length] = []
    for row, spec in sample.readable:
        try:
            lengths.append(_Length(row, len(template.encode_prompt(spec.messages, offered(subject, spec)))))
        except TemplateError as error:
            advice = "Change the row's messages, or take a model whose template can render them."
            tally.add("data-prompt", Severity.PROBLEM, str(error), advice, row.place)
    yield from tally.findings()
    if not subject.tools_complete:
        return  # settings and tools are not what they should be
    if lengths:
        yield from _prompts(subject, sample, lengths)
        yield from _tools(subject, template)
    limit = prompt_limit(subject)
    fitting = [length for length in lengths if limit is None or length.tokens <= limit]
    if fitting:
        yield from _response(subject, max(fitting, key=lambda length: length.tokens))
    yield from _tool_results(subject)


def offered(subject: Subject, spec: RequestSpec) -> list[ToolSchema]:
    """The tools this row offers, unknown names left out."""
    names = spec.tool_names
    return [schema for schema in subject.schemas if names is None or schema.name in names]


def _prompts(subject: Subject, sample: RowSample, lengths: Sequence[_Length]) -> Findings:
    tokens = [length.tokens for length in lengths]
    spread = f"{min(tokens):,} to {max(tokens):,} tokens, {statistics.median(tokens):,.0f} in the middle"
    limit = prompt_limit(subject)
    long = [length for length in lengths if limit is not None and length.tokens > limit]
    if not long:
        yield ok("budget-prompt", f"prompts take {spread}" + (f"; the limit is {limit:,}" if limit else ""))
        return
    longest = max(long, key=lambda length: length.tokens)
    what = f"{len(long):,} of {len(sample.rows):,} prompts are longer than {limit:,} tokens, the longest takes {longest.tokens:,}"
    if subject.launch is not None and subject.launch.get("data.filter_overlong_prompts") and len(long) < len(lengths):
        advice = "verl leaves these rows out (data.filter_overlong_prompts); raise data.max_prompt_length to keep them."
        yield note("budget-prompt", what, advice, longest.row.place)
    else:
        key = "data.max_prompt_length" if subject.launch is not None else "max_prompt_tokens under `rollout:`"
        advice = f"A prompt is never cut: such a rollout ends at once and trains nothing. Raise {key}, or leave the rows out."
        yield problem("budget-prompt", what, advice, longest.row.place)


def prompt_limit(subject: Subject) -> int | None:
    """Most tokens a prompt may have; None where nothing says."""
    context = _context(subject)
    limits = [subject.settings.max_prompt_tokens, None if context is None else context - 1]
    return min((limit for limit in limits if limit is not None), default=None)


def _context(subject: Subject) -> int | None:
    known = [limit for limit in (subject.settings.max_model_len, subject.context_tokens) if limit is not None]
    return min(known, default=None)


def _response(subject: Subject, longest: _Length) -> Findings:
    context, budget = _context(subject), subject.settings.max_response_tokens
    if context is None or longest.tokens + budget <= context:
        yield ok(
            "budget-response", f"max_response_tokens is {budget:,}, and the longest prompt leaves room for all of it"
        )
        return
    left = max(0, context - longest.tokens)
    yield note(
        "budget-response",
        f"the longest prompt leaves {left:,} tokens of the context of {context:,}; max_response_tokens is {budget:,}",
        "Such conversations end as max_model_len. Lower max_response_tokens, raise the context, or shorten the prompts.",
        longest.row.place,
    )


def _tools(subject: Subject, template: HFChatTemplate) -> Findings:
    row = subject.shown_row
    if row is None or row.spec is None or not (schemas := offered(subject, row.spec)):
        return
    try:
        with_tools = len(template.encode_prompt(row.spec.messages, schemas))
        without = len(template.encode_prompt(row.spec.messages, []))
    except TemplateError:
        return  # told for the rows already
    share, limit = with_tools - without, prompt_limit(subject)
    what = f"the tools' schemas take {share:,} of the {with_tools:,} tokens of this row's prompt"
    if limit is not None and share > limit // 2:
        advice = "Shorten descriptions, offer fewer tools (extra_info.tool_selection), or raise the prompt's limit."
        yield note("budget-tools", f"{what}, more than half of what a prompt may take ({limit:,})", advice, row.place)
    else:
        yield ok("budget-tools", what, row.place)


def _tool_results(subject: Subject) -> Findings:
    settings = subject.settings
    if subject.schemas and settings.max_tool_result_tokens >= settings.max_response_tokens:
        yield note(
            "budget-tool-result",
            f"one tool result may take {settings.max_tool_result_tokens:,} tokens (max_tool_result_tokens), the whole "
            f"conversation has {settings.max_response_tokens:,} (max_response_tokens)",
            "A long result would end the conversation: lower max_tool_result_tokens, or raise max_response_tokens.",
        )
