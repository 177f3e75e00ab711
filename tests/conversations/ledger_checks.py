"""Invariants 1, 2, 3 and 5: the trajectory against the engine's own record of what it was asked and what it gave."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from conversations.evidence import got_ids, kept, must, roles_after
from conversations.plans import Mishap
from conversations.play import Asked, Played
from conversations.speakers import Manner

from sglang_multiturn import Disposition, FinishReason, StopReason, TokenLedger, Trajectory
from sglang_multiturn.errors import LedgerError
from sglang_multiturn.tokens import Origin, Segment, digest_ids


def nothing_sampled_changes(played: Played) -> None:
    """Tokens of origin `sampled`, in order, are exactly the engine's."""
    segments = [segment for segment in played.trajectory.segments if segment.origin is Origin.SAMPLED]
    generations = kept(played)
    must(len(segments) == len(generations), "1", f"{len(generations)} generations, {len(segments)} sampled segments")
    for segment, asked in zip(segments, generations, strict=True):
        must(list(segment.ids) == got_ids(asked), "1", f"turn {asked.id.turn}: {list(segment.ids)} of {got_ids(asked)}")
        must(segment.turn == asked.id.turn, "1", f"turn {asked.id.turn} stands as turn {segment.turn}")


def inputs_extend_each_other(played: Played) -> None:
    """Each turn is given what the one before was given and sampled, and more; `split` begins anew where it must."""
    begun = {row.turns[0].turn for row in played.trajectory.rows[1:] if row.turns}
    must(not begun or played.config.history == "split", "2", f"turns {begun} begin rows, though history is kept")
    for earlier, later in itertools.pairwise(kept(played)):
        before, turn = earlier.given + got_ids(earlier), later.id.turn
        if turn in begun and earlier.id.turn != turn:
            keeps = all(played.world.template.keeps_history(role) for role in roles_after(played, earlier.id.turn))
            must(not keeps, "2", f"turn {turn} begins a row, though the template keeps history")
        else:
            must(later.given[: len(before)] == before, "2", f"turn {turn} was given other tokens than came before")
    for earlier, later in itertools.pairwise(played.asked):
        if earlier.id.turn == later.id.turn:  # asked again: with what it had
            before = earlier.given + ([] if earlier.got is None else got_ids(earlier))
            must(later.given == before, "2", f"turn {later.id.turn} was asked again with other tokens")
    for record, asked in zip(played.trajectory.turns, kept(played), strict=True):
        told = record.turn == asked.id.turn and record.input_digest == digest_ids(asked.given)
        must(told, "2", f"the record of turn {record.turn} tells otherwise")


def rows_are_what_the_engine_saw(played: Played) -> None:
    """Ids, mask, log-probabilities and versions, as they follow from the engine's record alone."""
    generations = kept(played)
    for row in played.trajectory.rows:
        count = sum(segment.origin is Origin.SAMPLED for segment in row.segments)
        own, generations = generations[:count], generations[count:]
        if not own:
            must(not any(row.response_mask()), "1", "a mask is 1 where nothing was sampled")
            continue
        seen = own[-1].given + got_ids(own[-1])
        must(row.input_ids[: len(seen)] == seen, "2", "a row is not what the engine was given and sampled")
        must(row.prompt_ids == own[0].given, "2", "a row's prompt is not what the engine was given first")
        must(row.prompt_ids + row.response_ids == row.input_ids, "3", "prompt and response are not the whole")
        mask, logprobs, versions = _expected(own, row.num_response_tokens)
        must(row.response_mask() == mask, "1", f"mask {row.response_mask()} is not {mask}")
        must(row.response_logprobs == logprobs, "3", f"log-probabilities {row.response_logprobs} are not {logprobs}")
        must(row.response_weight_versions == versions, "3", "weight versions are not the engine's")
    must(not generations, "1", "a generation stands in no row")
    if played.trajectory.disposition is Disposition.MASK:
        must(not any(played.trajectory.response_mask), "1", "a masked trajectory has a mask of 1")


def _expected(own: Sequence[Asked], size: int) -> tuple[list[int], list[float] | None, list[int | None]]:
    mask = [0] * size
    logprobs: list[float] | None = [0.0] * size
    versions: list[int | None] = [None] * size
    for asked in own:
        assert asked.got is not None
        at, count = len(asked.given) - len(own[0].given), len(asked.got.token_ids)
        mask[at : at + count] = [1] * count
        versions[at : at + count] = [asked.got.weight_version] * count
        if asked.got.logprobs is None and count:
            logprobs = None
        elif logprobs is not None and asked.got.logprobs is not None:
            logprobs[at : at + count] = asked.got.logprobs
    return mask, logprobs, versions


def any_cut_keeps_one_length(played: Played) -> None:
    """A ledger cut after any segment, or inside one, still has lists of one length; a cut turn is found out."""
    row = played.trajectory.rows[played.plan.cut % len(played.trajectory.rows)]
    if not row.segments:
        return
    at = played.plan.cut % len(row.segments)
    last = row.segments[at]
    part = _cut_segment(last, played.plan.cut % (len(last.ids) + 1))
    turns = row.turns[: sum(segment.origin is Origin.SAMPLED for segment in row.segments[: at + 1])]
    cut = TokenLedger([*row.segments[:at], part], turns)
    sizes = {len(cut.response_ids), len(cut.response_mask()), len(cut.response_weight_versions)}
    sizes |= {len(cut.response_origins), cut.num_response_tokens}
    sizes |= set() if cut.response_logprobs is None else {len(cut.response_logprobs)}
    must(len(sizes) == 1, "3", f"lengths differ after a cut: {sizes}")
    changed = len(part.ids) != len(last.ids) and last.origin is Origin.SAMPLED
    must(_is_refused(cut) == changed, "3", f"a ledger {'with a' if changed else 'without any'} cut turn is misjudged")


def _cut_segment(segment: Segment, size: int) -> Segment:
    logprobs = None if segment.logprobs is None else segment.logprobs[:size]
    return dataclasses.replace(segment, ids=segment.ids[:size], logprobs=logprobs)


def _is_refused(ledger: TokenLedger) -> bool:
    try:
        ledger.check()
    except LedgerError:
        return True
    return False


def a_row_ends_with_a_sampled_token(played: Played) -> None:
    """Cut where training rows are cut."""
    for row in played.trajectory.rows:
        end, mask = row.num_tokens_to_last_sampled, row.response_mask()
        must(
            not any(mask[end:]) and (end == 0 or mask[end - 1] == 1), "3", f"a row is cut at {end}, its mask is {mask}"
        )


def it_ended_for_a_reason(played: Played) -> None:
    """There is a trajectory, and a fault or an abort only where one was planned."""
    trajectory, plan = played.trajectory, played.plan
    turns = trajectory.metrics.assistant_turns
    stand = {asked.id.turn for asked in kept(played)}
    must(stand == set(range(turns)), "5", f"{turns} turns are counted, generations of {stand} stand")
    if trajectory.stop_reason is StopReason.ERROR:
        must("planned" in getattr(trajectory.error, "message", ""), "5", f"it failed with {trajectory.error}")
    elif trajectory.stop_reason is StopReason.ABORTED:
        aborting = any(turn.mishap in (Mishap.ABORT, Mishap.ENGINE_ABORT) for turn in plan.turns)
        by_tool = any(answer.manner is Manner.ABORTS for answer in plan.answers)
        must(aborting or by_tool or plan.aborted_before, "5", "nobody aborted it")
    else:
        last = {record.turn: record.finish_reason for record in trajectory.turns}
        must(FinishReason.ABORT not in last.values(), "5", f"an aborted turn ended as {trajectory.stop_reason}")


def it_proves_itself(played: Played) -> None:
    """The trajectory's own check, here and after a way through JSON."""
    trajectory = played.trajectory
    try:
        trajectory.check(end_ids=played.world.template.end_ids)
    except LedgerError as error:
        must(False, "1 to 4", str(error))
    if played.plan.cut % 3 == 0:  # it takes as long as the conversation
        must(Trajectory.from_json(trajectory.to_json()) == trajectory, "5", "JSON changes a trajectory")
