"""The one property: a random conversation through the real parts keeps every invariant it can show."""

from __future__ import annotations

from conversations import budget_checks, ledger_checks, word_checks
from conversations.plans import plan_of
from conversations.play import Played, play
from conversations.worlds import World

CHECKS = (
    ledger_checks.it_ended_for_a_reason,
    ledger_checks.nothing_sampled_changes,
    ledger_checks.inputs_extend_each_other,
    ledger_checks.rows_are_what_the_engine_saw,
    ledger_checks.any_cut_keeps_one_length,
    ledger_checks.a_row_ends_with_a_sampled_token,
    word_checks.turns_end_once,
    word_checks.words_never_become_control_tokens,
    word_checks.words_are_shown,
    word_checks.prompts_are_the_template_s,
    word_checks.deltas_are_what_the_template_renders,
    word_checks.a_canonical_conversation_has_not_drifted,
    budget_checks.each_generation_asks_for_what_is_left,
    budget_checks.rows_are_within_their_budgets,
    budget_checks.answers_stand_in_the_order_of_the_calls,
    budget_checks.answers_are_whole_or_say_that_they_were_cut,
    ledger_checks.it_proves_itself,
)


def check_conversation(data: bytes, world: World) -> Played:
    """Have the conversation that these bytes stand for, and check it. Raises InvariantError."""
    played = play(world, plan_of(data, world))
    for check in CHECKS:
        check(played)
    return played
