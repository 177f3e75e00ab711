"""Invariants 4 and 13, and whole conversations: the trajectory against the tokenizer and its chat template."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from conversations.evidence import answered, got_ids, has_answered, kept, must, prompts, roles_after, said_after
from conversations.play import Played, Rendered
from conversations.worlds import TOOLS_MOVE

from sglang_multiturn import Message
from sglang_multiturn.tokens import Origin, TokenLedger


def turns_end_once(played: Played) -> None:
    """Between a turn and what follows, the template's end stands once: sampled, or added as the first token."""
    generations = {asked.id.turn: asked for asked in kept(played)}
    for row in played.trajectory.rows:
        for turn, after in answered(row):
            roles = roles_after(played, turn)
            end = played.world.ends[roles[0]]
            last, first = got_ids(generations[turn])[-1:], list(after[0].ids[:1])
            must(end in (*last, *first), "4", f"turn {turn} ends with {last}, then {first}: {end} stands nowhere")
            added = [i for segment in after if segment.origin is Origin.BOUNDARY for i in segment.ids]
            found = (*([end] if last == [end] else []), *played.world.controls_of(added))
            expected = played.world.frame_controls(roles, has_answered(played, turn))
            must(found == expected, "4 and 13", f"turn {turn}: control tokens {found} follow, not {expected}")


def words_never_become_control_tokens(played: Played) -> None:
    """What tools and users say after a turn."""
    for segment in played.trajectory.segments:
        if segment.origin in (Origin.TOOL, Origin.USER):
            found = played.world.controls_of(segment.ids)
            must(not found, "13", f"what a {segment.origin} said holds control tokens {found}")


def words_are_shown(played: Played) -> None:
    """What a tool or user said stands in the tokens of that origin."""
    for row in played.trajectory.rows:
        for turn, after in answered(row):
            contents = [segment for segment in after if segment.origin is not Origin.BOUNDARY]
            said = [message for message in said_after(played, turn) if message.text]
            if len(said) != len(contents):  # white space may be left out where it is all that was said
                said = [message for message in said if message.text.strip()]
            if len(said) == len(contents):
                for message, segment in zip(said, contents, strict=True):
                    _must_show(played, message, segment.ids.tolist(), f"turn {turn}")
            else:
                must(any(not message.text.strip() for message in said_after(played, turn)), "13", "words are missing")


def prompts_are_the_template_s(played: Played) -> None:
    """As the tokenizer encodes them; where a control token is spelt out in one, with as many of them as without."""
    must(played.plan.aborted_before or bool(played.trajectory.rows[0].prompt_ids), "7", "there is no prompt")
    example, its_ids = played.world.examples[tuple(message.role for message in played.plan.prompt)]
    for row, messages in prompts(played):
        if messages == list(example):
            must(row.prompt_ids == its_ids, "1", "the prompt is not what the tokenizer makes of it")
        else:
            _must_be_prompt(played, row, messages)


def _must_be_prompt(played: Played, row: TokenLedger, messages: Sequence[Message]) -> None:
    world, ids = played.world, row.prompt_ids
    untrusted = [message for message in messages if message.role in ("tool", "user")]
    if all(world.is_benign(message.text) for message in untrusted):
        must(ids == world.encode(world.render(messages)), "1", "the prompt is not what the tokenizer makes of it")
        return
    found, expected = world.controls_of(ids), world.prompt_controls(messages)
    must(found == expected, "13", f"a prompt has the control tokens {found}, without what was said {expected}")
    for message in untrusted:
        _must_show(played, message, ids, "the prompt")


def _must_show(played: Played, message: Message, ids: list[int], where: str) -> None:
    shown_as = played.world.shown_as[message.role]
    text = played.world.text_of(ids)
    shown = shown_as is None or _plain(shown_as(message.text.strip())) in _plain(text)
    must(shown, "13", f"{where}: {message.role} said {message.text!r}, which is not in {text!r}")


def _plain(text: str) -> str:
    """What every vocabulary gives back: some normalise, SentencePiece writes U+2581 for spaces and adds some."""
    return "".join(unicodedata.normalize("NFC", text).replace("\u2581", " ").split())


def deltas_are_what_the_template_renders(played: Played) -> None:
    """Where the model says what the template would, the tokens are those of the whole rendering."""
    generations = {asked.id.turn: asked for asked in kept(played)}
    for rendered in played.renderings:
        before, after = generations[rendered.turn], generations.get(rendered.turn + 1)
        if after is None or _is_written_otherwise(played, rendered):
            continue
        if rendered.whole:
            must(after.given == rendered.ids, "1 to 4", f"turn {rendered.turn}: tokens differ from the rendering's")
        delta = [rendered.ended, *after.given[len(before.given) + len(got_ids(before)) :]]
        must(rendered.ids[-len(delta) :] == delta, "4", f"turn {rendered.turn}: {delta} is not how the rendering ends")


def _is_written_otherwise(played: Played, rendered: Rendered) -> bool:
    """Whether a template is known not to append what followed this turn."""
    return played.world.family in TOOLS_MOVE and roles_after(played, rendered.turn)[0] == "user"


def a_canonical_conversation_has_not_drifted(played: Played) -> None:
    """The drift check agrees."""
    metrics = played.trajectory.metrics
    if played.renderings and all(rendered.whole for rendered in played.renderings):
        drift = metrics.drift_special_tokens + metrics.drift_boundary_tokens
        must(drift == 0, "drift", f"{drift} tokens drifted: {played.trajectory.drift}")
