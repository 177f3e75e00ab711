"""Prompts in the order in which they are started: as they come, or those first that took long before.

The longest rollout decides when a batch is complete, so it had better begin first. What a prompt takes is known from
earlier rollouts of the same uid. Only a window of prompts is looked at, and all of it is started before the next one is
read, so no prompt waits for ever.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

from sglang_multiturn.request import RequestSpec


class PromptQueue:
    """Hands out prompts one by one."""

    def __init__(self, prompts: Iterable[RequestSpec], *, look_ahead: int) -> None:
        """Read `prompts`, which may be endless, `look_ahead` at a time; 1 keeps them as they come."""
        self._prompts = iter(prompts)
        self._look_ahead = look_ahead
        self._window: collections.deque[RequestSpec] = collections.deque()
        self._lengths: dict[str, tuple[int, int]] = {}
        """By uid: how many rollouts there were, and the tokens of all of them."""
        self._total = (0, 0)

    def take(self) -> RequestSpec | None:
        """The next prompt; None when there are no more."""
        if not self._window:
            self._window.extend(sorted(itertools.islice(self._prompts, self._look_ahead), key=self._rank))
        return self._window.popleft() if self._window else None

    def note_length(self, uid: str, tokens: int) -> None:
        """A rollout of this prompt sampled so many tokens; of one that was aborted, at least so many."""
        count, total = self._lengths.get(uid, (0, 0))
        self._lengths[uid] = (count + 1, total + tokens)
        self._total = (self._total[0] + 1, self._total[1] + tokens)

    def _rank(self, prompt: RequestSpec) -> float:
        """Long ones first; one that nobody knows counts as average."""
        count, total = self._lengths.get(prompt.uid, self._total)
        return -total / count if count else 0.0
