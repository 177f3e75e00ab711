"""All probes of a template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_multiturn.chat.traits import system_turn, thinking, tool_turns, turns
from sglang_multiturn.chat.traits.advice import ADVICE
from sglang_multiturn.chat.traits.kinds import Trait
from sglang_multiturn.chat.traits.probe import Probe

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate

_PROBES = (
    system_turn.system_messages,
    system_turn.later_system,
    system_turn.developer_messages,
    system_turn.clock,
    thinking.generation_prompt,
    thinking.stripped,
    thinking.empty_blocks,
    tool_turns.tools_list,
    tool_turns.tool_messages,
    tool_turns.parallel_results,
    tool_turns.names_and_ids,
    tool_turns.calls,
    tool_turns.two_calls,
    turns.ends,
    turns.after_tools,
    turns.trimming,
    turns.swallowed,
    turns.alternation,
    turns.parts,
    turns.bos,
)


def examine(template: HFChatTemplate) -> tuple[Trait, ...]:
    """What this template does that surprises people; about forty small renderings, a tenth of a second.

    A template is asked, never known by name. Traits come in the order system turn, thoughts, tools, turns; a kind
    comes at most once.
    """
    probe = Probe(template)
    traits: dict[str, Trait] = {}
    for look in _PROBES:
        for kind, detail in look(probe):
            severity, advice = ADVICE[kind]
            traits.setdefault(kind, Trait(kind=kind, detail=detail, advice=advice, severity=severity))
    return tuple(traits.values())
