"""What a template does that surprises people, weighed by whether these tools and rows come across it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from sglang_multiturn.chat.traits import Trait, TraitKind, examine
from sglang_multiturn.doctor.findings import Finding, Findings, Severity
from sglang_multiturn.doctor.rows import RowSample
from sglang_multiturn.schemas import Message

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate

_NO_TOOL_ROLE = frozenset({TraitKind.TOOL_REFUSED, TraitKind.TOOL_DROPPED})
"""Told by the proof already, where tools are configured."""

Conversation = tuple[Message, ...]


def _has_role(*roles: str) -> Callable[[Conversation], bool]:
    return lambda messages: any(message.role in roles for message in messages)


def _has_parts(messages: Conversation) -> bool:
    return any(isinstance(message.content, list) for message in messages)


def _has_no_system(messages: Conversation) -> bool:
    return messages[0].role != "system"


_MET_BY: Mapping[TraitKind, Callable[[Conversation], bool]] = {
    TraitKind.DEFAULT_SYSTEM: _has_no_system,
    TraitKind.SYSTEM_REFUSED: _has_role("system"),
    TraitKind.SYSTEM_DROPPED: _has_role("system"),
    TraitKind.SYSTEM_MOVES: _has_role("system"),
    TraitKind.DEVELOPER_REFUSED: _has_role("developer"),
    TraitKind.DEVELOPER_DROPPED: _has_role("developer"),
    TraitKind.PARTS_REFUSED: _has_parts,
    TraitKind.PARTS_CHANGED: _has_parts,
}
"""Which conversations come across a trait; any may, where nothing is said."""


def template_traits(template: HFChatTemplate, rows: RowSample | None, *, with_tools: bool) -> Findings:
    """Every trait; one that no row comes across, or that only tools would, is no more than worth knowing."""
    conversations = [] if rows is None else [spec.messages for _, spec in rows.readable]
    for trait in examine(template):
        if with_tools and trait.kind in _NO_TOOL_ROLE:
            continue
        severity = _severity(trait, conversations, with_tools=with_tools)
        yield Finding(
            check=f"template-{trait.kind.value.replace('_', '-')}",
            severity=severity,
            what=_sentence(trait.detail),
            advice="" if severity is Severity.OK else _sentence(trait.advice),
        )


def _severity(trait: Trait, conversations: Sequence[Conversation], *, with_tools: bool) -> Severity:
    severity = Severity(trait.severity.value)
    met_by = _MET_BY.get(trait.kind)
    if met_by is not None and conversations and not any(map(met_by, conversations)):
        return Severity.OK
    return Severity.NOTE if severity is Severity.PROBLEM and not with_tools else severity


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
