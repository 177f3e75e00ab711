"""Tokens sampled by weights that are too old to train on, and what becomes of their conversations.

A suspended conversation goes on with newer weights and keeps what older ones sampled. How far apart the two may be is
`max_staleness`, in weight versions; `stale` says what happens beyond it.
"""

from __future__ import annotations

from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.request import AsyncRolloutRequest, Disposition, StopReason


def stale_before(request: AsyncRolloutRequest, config: RolloutConfig, weight_version: int | None) -> int | None:
    """The version before which tokens are too old, where some of the request's are; None where none is.

    Args:
        request: what has been sampled so far.
        config: `max_staleness` of it.
        weight_version: of the weights now serving; None where nobody knows.
    """
    if config.max_staleness is None or weight_version is None or request.spec.validate:
        return None
    limit = weight_version - config.max_staleness
    versions = (row.oldest_weight_version for row in request.rows)
    return limit if any(version is not None and version < limit for version in versions) else None


def disposition(config: RolloutConfig, stop_reason: StopReason, stale: int | None) -> Disposition:
    """What becomes of a rollout that ended so, `stale` being what `stale_before` says of it."""
    if stale is not None and config.stale == "drop":
        return Disposition.DROP
    return config.disposition(stop_reason)
