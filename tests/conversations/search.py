"""Many random conversations of a family, by hypothesis, and what was found."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
from conversations.choices import SIZE
from conversations.invariants import check_conversation
from conversations.plans import plan_of
from conversations.worlds import World, world
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from families import FAMILIES


@dataclass(slots=True, kw_only=True)
class Found:
    """What a family's conversations showed."""

    family: str
    stand_in: bool
    """The vocabulary is another family's; template, special tokens and ends are its own."""
    conversations: int = 0
    generations: int = 0
    tokens: int = 0
    turns_rendered: int = 0
    """Turns after which the tokens were compared with the tokenizer's of the whole rendering."""
    violation: str | None = None
    """The first one, made as small as possible, with what brings it back."""
    seconds: float = 0.0


def search(
    family: str, examples: int, *, seed: int | None = None, progress: Callable[[int], None] | None = None
) -> Found:
    """Check so many conversations, or stop at a violation.

    Args:
        seed: None takes the same conversations each time.
        progress: told now and then how many there were.
    """
    found = Found(family=family, stand_in=family in FAMILIES and FAMILIES[family].stand_in)
    started, loaded, failing = time.monotonic(), world(family), b""

    def one(data: bytes) -> None:
        nonlocal failing
        try:
            _count(found, data, loaded)
        except Exception:
            failing = data
            raise
        if progress is not None and found.conversations % 50 == 0:
            progress(found.conversations)

    gc.freeze()  # a vocabulary is a million objects, and collecting would look at all of them again and again
    try:
        _many(one, examples, seed)()
    except Exception as error:  # noqa: BLE001 - whatever the parts raise is what was looked for
        found.violation = f"{type(error).__name__}: {error}\n{again(family, failing)}"
    finally:
        gc.unfreeze()
    found.seconds = time.monotonic() - started
    return found


def _count(found: Found, data: bytes, loaded: World) -> None:
    played = check_conversation(data, loaded)
    found.conversations += 1
    found.generations += len(played.asked)
    found.tokens += sum(row.num_tokens for row in played.trajectory.rows)
    found.turns_rendered += sum(rendered.whole for rendered in played.renderings)


def _many(one: Callable[[bytes], None], examples: int, seed: int | None) -> Callable[[], None]:
    chosen = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    drawn = chosen(given(st.binary(min_size=SIZE, max_size=SIZE))(one))
    return drawn if seed is None else hypothesis.seed(seed)(drawn)


def again(family: str, data: bytes) -> str:
    """A conversation, and the command that has it again."""
    plan = plan_of(data, world(family))
    told = "\n".join(f"  {name} = {value!r}" for name, value in _told(plan))
    return f"{told}\nagain: python -m conversations.prove --family {family} --again {data.rstrip(bytes(1)).hex()}"


def _told(plan: object) -> list[tuple[str, object]]:
    assert dataclasses.is_dataclass(plan)
    return [(field.name, getattr(plan, field.name)) for field in dataclasses.fields(plan)]
