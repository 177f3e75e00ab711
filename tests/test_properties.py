"""Random conversations of every family keep every invariant (`make prove` has 20,000 a family)."""

from __future__ import annotations

import random

import pytest

from sglang_multiturn import StopReason

from chat_templates import missing
from families import NAMES

pytest.importorskip("transformers")

from conversations.choices import SIZE
from conversations.corners import CORNERS, corners
from conversations.invariants import check_conversation
from conversations.search import search
from conversations.worlds import world

EXAMPLES = 500


@pytest.mark.parametrize("family", NAMES)
def test_random_conversations_keep_every_invariant(family: str) -> None:
    if reason := missing(family):
        pytest.skip(reason)
    found = search(family, EXAMPLES)
    assert found.violation is None, found.violation
    assert found.conversations >= EXAMPLES


def test_so_many_conversations_leave_nothing_out() -> None:
    if reason := missing("qwen3"):
        pytest.skip(reason)
    bytes_of, reached = random.Random(0), set[str]()
    for _ in range(EXAMPLES):
        reached |= corners(check_conversation(bytes_of.randbytes(SIZE), world("qwen3")))
    never = {StopReason.TIMEOUT, StopReason.ENVIRONMENT_DONE}  # another word for an abort, and for `user_stop`
    assert reached == set(CORNERS) | {reason.value for reason in set(StopReason) - never}
