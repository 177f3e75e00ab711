"""A seed for every request, so that a run that is resumed samples the tokens it would have sampled.

`rollout.full_determinism` asks for it. verl sets what vLLM needs for it and nothing for SGLang; with it our servers start
SGLang in its deterministic mode (`server.SglangServer.launch_server`), which draws by a request's own seed. A seed comes
from what a conversation is, not from when or where it runs: the run's seed, the dataset's row, the sample, the step, the turn.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from sglang_multiturn.request import RequestSpec

_SEED_BYTES = 4


class Seeds:
    """Gives conversations their seeds; none where nobody asked for determinism."""

    def __init__(self, rollout: Any) -> None:
        """Read `rollout.full_determinism` and `rollout.seed`."""
        self._seed = int(rollout.get("seed", 0)) if rollout.get("full_determinism", False) else None

    def seeded(self, spec: RequestSpec) -> RequestSpec:
        """The same request with a seed of its own."""
        if self._seed is None:
            return spec
        seed = seed_of(self._seed, spec.input_index, spec.sample_index, spec.step, int(spec.validate))
        return dataclasses.replace(spec, sampling=dataclasses.replace(spec.sampling, seed=seed))


def seed_of(*identity: int) -> int:
    """A seed for what these numbers name: the same in every run and process, unlike `hash`."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=_SEED_BYTES).digest()
    return int.from_bytes(digest, "big") >> 1  # SGLang keeps it in a signed integer, and some samplers in 32 bits
