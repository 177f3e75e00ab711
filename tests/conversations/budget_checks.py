"""Invariant 7: budgets, and answers that are cut."""

from __future__ import annotations

import re
import sys

from conversations.evidence import got_ids, kept, must, said_after
from conversations.play import Asked, Played
from conversations.speakers import Manner

from sglang_multiturn import StopReason
from sglang_multiturn.trajectory import CallOutcome

MARK = re.compile(r"\[(\d+) characters cut\]")


def each_generation_asks_for_what_is_left(played: Played) -> None:
    """For no more, never for nothing; and it asks to stop at every end of a turn."""
    config = played.config
    for asked in played.asked:
        left = _left(played, asked)
        most = min(left, (config.max_turn_tokens or sys.maxsize) - _sampled_in_turn(played, asked))
        wanted = asked.params.max_new_tokens
        must(wanted is not None and 1 <= wanted <= most, "7", f"turn {asked.id.turn} asks for {wanted} of {most}")
        must(config.history == "split" or wanted == most, "7", f"turn {asked.id.turn} asks for {wanted} of {most}")
        stops = set(asked.params.stop_token_ids)
        must(stops.issuperset(played.world.template.stop_token_ids), "4", "an end of turn is no stop id")


def _left(played: Played, asked: Asked) -> int:
    """Of the budget. Where rows begin anew, only what was sampled counts here for sure."""
    used = len(asked.given) - len(played.asked[0].given)
    if played.config.history == "split":
        used = sum(len(got_ids(earlier)) for earlier in _kept_before(played, asked))
    return min(played.config.max_response_tokens - used, _longest(played) - len(asked.given))


def _sampled_in_turn(played: Played, asked: Asked) -> int:
    return sum(len(got_ids(earlier)) for earlier in _kept_before(played, asked) if earlier.id.turn == asked.id.turn)


def _kept_before(played: Played, asked: Asked) -> list[Asked]:
    return [earlier for earlier in kept(played) if earlier.id < asked.id]


def _longest(played: Played) -> int:
    longest = played.plan.max_model_len
    return min(longest, played.config.max_model_len or longest)


def rows_are_within_their_budgets(played: Played) -> None:
    """Whatever tools and users said."""
    config, longest = played.config, _longest(played)
    for row in played.trajectory.rows:
        must(row.num_response_tokens <= config.max_response_tokens, "7", "the response is over its budget")
        if row.turns:
            must(row.num_tokens <= longest, "7", f"a row has {row.num_tokens} tokens, {longest} fit")
    most = min(config.max_prompt_tokens or longest, longest - 1)
    too_long = played.trajectory.rows[0].num_prompt_tokens > most
    ended = played.trajectory.stop_reason is StopReason.PROMPT_TOO_LONG
    must(ended == too_long and not (too_long and played.asked), "7", f"a prompt of {most} tokens is judged wrongly")


def answers_stand_in_the_order_of_the_calls(played: Played) -> None:
    """In the records, the messages and the tokens."""
    ids = [record.call_id for record in played.trajectory.tool_calls]
    must(len(set(ids)) == len(ids), "5", f"call ids are not unique: {ids}")
    must(ids == sorted(ids), "5", f"calls are out of order: {ids}")
    shown = [segment.call_id for segment in played.trajectory.segments if segment.call_id is not None]
    must(shown == [i for i in ids if i in shown], "5", f"answers {shown} are out of the order of the calls {ids}")
    for turn in range(played.trajectory.metrics.tool_turns):
        records = [record for record in played.trajectory.tool_calls if record.turn == turn]
        said = [(message.tool_call_id, message.text) for message in said_after(played, turn) if message.role == "tool"]
        must(said == [(r.call_id, r.answer) for r in records] or not records, "5", f"turn {turn} was answered {said}")


def answers_are_whole_or_say_that_they_were_cut(played: Played) -> None:
    """Each call was answered with what the tool said to it."""
    limit, cut = played.config.max_tool_result_tokens, 0
    for record in played.trajectory.tool_calls:
        if record.outcome not in (CallOutcome.OK, CallOutcome.TOOL_ERROR):
            continue
        planned = played.plan.answers[(record.arguments or {}).get("i", 0) % len(played.plan.answers)]
        whole = ("Error: " if planned.manner is Manner.REFUSES else "") + planned.text.replace("\ud83d", "?")
        if record.answer == whole:
            continue
        cut += 1
        marked = is_cut(record.answer, whole, played.config.tool_result_cut)
        must(marked, "7", f"an answer was changed without a mark: {record.answer!r} of {whole!r}")
        must(len(whole.encode()) > limit, "7", "a short answer was cut")
    must(cut <= played.trajectory.metrics.cut_tool_results, "7", "an answer was cut and not counted")


def is_cut(shown: str, whole: str, side: str) -> bool:
    """Whether this is the text without the characters that a mark in it tells of, on this side."""
    return any(_fits(shown, mark, whole, side) for mark in MARK.finditer(shown))


def _fits(shown: str, mark: re.Match[str], whole: str, side: str) -> bool:
    head, tail = shown[: mark.start()], shown[mark.end() :]
    head = head if side == "left" else head[:-1]
    tail = tail if side == "right" else tail[1:]
    place = {"left": not head, "right": not tail, "middle": len(head) - len(tail) in (0, 1)}[side]
    size = len(head) + len(tail) + int(mark[1]) == len(whole)
    return place and size and whole.startswith(head) and whole.endswith(tail)
