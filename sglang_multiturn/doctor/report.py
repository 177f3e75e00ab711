"""An examination as something to read: on a terminal, in a file without colours, or as JSON.

Nothing of what rows, tools or models say is ever taken as markup or as an escape sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from sglang_multiturn.doctor.catalogue import GROUPS
from sglang_multiturn.doctor.conversation import Played
from sglang_multiturn.doctor.examination import Examination, Prompt
from sglang_multiturn.doctor.findings import Finding, Severity
from sglang_multiturn.doctor.tokens_view import TokenView, printable

MAX_PROMPT_TOKENS = 600
"""Tokens of a prompt that are shown; the middle of a longer one is left out."""
MAX_SEGMENT_TOKENS = 160
MAX_JSON_TOKENS = 20_000

_SEVERITY_STYLE = {Severity.OK: "green", Severity.NOTE: "yellow", Severity.PROBLEM: "bold red"}
_BACKGROUNDS = ("on grey19", "on grey27")
_CONTROL_STYLE = "bold magenta"
_ORIGIN_STYLE = {"prompt": "white", "sampled": "green", "tool": "yellow", "user": "cyan", "boundary": "bright_black"}


def print_report(result: Examination, console: Console, *, verbose: bool) -> None:
    """Prompt, conversation, findings by group, and how many there are. Without `verbose` what is fine is only counted."""
    if result.prompt is not None:
        _print_prompt(result.prompt, console)
    if result.played is not None:
        _print_conversation(result.played, console)
    for group, heading in GROUPS.items():
        _print_group(heading, [f for f in result.findings if f.group == group], console, verbose=verbose)
    _print_counts(result, console)


def _print_prompt(prompt: Prompt, console: Console) -> None:
    _heading(console, f"The prompt of {prompt.place}, {len(prompt.tokens):,} tokens")
    _indented(console, tokens_text(prompt.tokens, MAX_PROMPT_TOKENS, colour=_has_colour(console)))


def _print_conversation(played: Played, console: Console) -> None:
    said = f"{played.trained_tokens} of {played.response_tokens} response tokens are trained"
    _heading(console, f"A scripted conversation, ended as {played.stop_reason}: {said}")
    colour = _has_colour(console)
    for segment in played.segments:
        if segment.origin == "prompt":
            continue  # shown above
        mask = "trained" if segment.trained else "mask 0"
        label = f"{segment.origin}, turn {segment.turn}, {mask}, {len(segment.tokens)} tokens"
        style = _ORIGIN_STYLE.get(segment.origin, "")
        console.print(Text(f"  {label}", style=style))
        _indented(console, tokens_text(segment.tokens, MAX_SEGMENT_TOKENS, colour=colour, style=style), left=4)


def _print_group(heading: str, findings: Sequence[Finding], console: Console, *, verbose: bool) -> None:
    shown = [f for f in findings if verbose or f.severity is not Severity.OK]
    if not shown:
        return
    _heading(console, heading)
    for finding in shown:
        console.print(_finding_text(finding), soft_wrap=True)


def _finding_text(finding: Finding) -> Text:
    text = Text("  ")
    text.append(f"{finding.severity.value:8}", style=_SEVERITY_STYLE[finding.severity])
    text.append(printable(finding.what))
    text.append(f"  [{finding.check}]", style="bright_black")
    if finding.where:
        text.append(f"\n          at {printable(finding.where)}", style="bright_black")
    if finding.advice:
        text.append(f"\n          → {printable(finding.advice)}")
    return text


def _print_counts(result: Examination, console: Console) -> None:
    counts = [(severity, result.count(severity)) for severity in (Severity.PROBLEM, Severity.NOTE, Severity.OK)]
    text = Text("\n")
    for severity, count in counts:
        plural = "s" if count != 1 and severity is not Severity.OK else ""
        text.append(f"{count} {severity.value}{plural}", style=_SEVERITY_STYLE[severity])
        text.append(", " if severity is not Severity.OK else f" in {result.took_s:.1f} s")
    console.print(text)


def tokens_text(tokens: Sequence[TokenView], most: int, *, colour: bool, style: str = "") -> Text:
    """Tokens one after the other; their edges are seen by background, or by `·` where there is no colour."""
    text = Text(overflow="fold")
    for index, token in _with_gap(tokens, most):
        if token is None:
            text.append(f"\n… {len(tokens) - most:,} tokens are not shown …\n", style="bright_black")
        elif colour:
            shade = _BACKGROUNDS[index % 2]
            text.append(_visible(token.text), style=f"{_CONTROL_STYLE if token.control else style} {shade}".strip())
        else:
            text.append(f"⟦{token.text}⟧" if token.control else f"{_visible(token.text)}")
            text.append("" if token.text.endswith("\n") else "·")
    return text


def _with_gap(tokens: Sequence[TokenView], most: int) -> Iterator[tuple[int, TokenView | None]]:
    """All tokens, or the first and last ones with a None between them."""
    if len(tokens) <= most:
        yield from enumerate(tokens)
        return
    half = most // 2
    yield from enumerate(tokens[:half])
    yield half, None
    yield from enumerate(tokens[len(tokens) - (most - half) :], start=len(tokens) - (most - half))


def _visible(text: str) -> str:
    return text.replace("\n", "↵\n").replace("\t", "⇥")


def _has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _heading(console: Console, text: str) -> None:
    console.print(Text(f"\n{printable(text)}", style="bold"), soft_wrap=True)


def _indented(console: Console, text: Text, left: int = 2) -> None:
    if _has_colour(console):
        console.print(Padding(text, (0, 0, 0, left)))
    else:  # lines stay as they are, however long
        for line in text.plain.removesuffix("\n").split("\n"):
            console.print(Text(" " * left + line), soft_wrap=True)


def to_json(result: Examination) -> str:
    """One JSON object, ASCII only."""
    return json.dumps(
        {
            "problems": result.count(Severity.PROBLEM),
            "notes": result.count(Severity.NOTE),
            "ok": result.count(Severity.OK),
            "took_s": round(result.took_s, 3),
            "findings": [_finding_json(finding) for finding in result.findings],
            "prompt": None if result.prompt is None else _prompt_json(result.prompt),
            "conversation": None if result.played is None else _conversation_json(result.played),
        }
    )


def _finding_json(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "severity": finding.severity.value,
        "what": finding.what,
        "where": finding.where,
        "advice": finding.advice,
    }


def _prompt_json(prompt: Prompt) -> dict[str, Any]:
    shown = prompt.tokens[:MAX_JSON_TOKENS]
    tokens = [{"id": token.id, "text": token.text, "control": token.control} for token in shown]
    return {"place": prompt.place, "num_tokens": len(prompt.tokens), "tokens": tokens}


def _conversation_json(played: Played) -> dict[str, Any]:
    return {
        "stop_reason": played.stop_reason,
        "calls": list(played.calls),
        "response_tokens": played.response_tokens,
        "trained_tokens": played.trained_tokens,
        "segments": [
            {
                "origin": segment.origin,
                "turn": segment.turn,
                "trained": segment.trained,
                "num_tokens": len(segment.tokens),
                "ids": [token.id for token in segment.tokens[:MAX_JSON_TOKENS]],
                "text": "".join(token.text for token in segment.tokens[:MAX_JSON_TOKENS]),
            }
            for segment in played.segments
        ],
    }
