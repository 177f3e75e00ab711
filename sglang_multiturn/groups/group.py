"""Groups: the rollouts of one prompt that are compared with each other, which of them are worth training on, and batches of them.

A dropped rollout stays in its group to be seen, and takes no part in anything that is worked out from the group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from sglang_multiturn.config import GroupConfig, RolloutConfig
from sglang_multiturn.request import Disposition, RequestSpec
from sglang_multiturn.trajectory import Trajectory

EQUAL_REWARDS = 1e-6
"""Rewards nearer to each other than this do not differ: it is what trainers add to a group's deviation before they divide."""


class FilterReason(StrEnum):
    """Why a complete group is not trained on."""

    TOO_FEW = "too_few"
    """Fewer than two rollouts were left to compare; the others were dropped."""
    NO_VARIANCE = "no_variance"
    """Its rewards do not differ, so nothing can be learned from them."""
    REJECTED = "rejected"
    """The user's own function said no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt, complete."""

    uid: str
    """Of this group alone. A prompt that comes again (a second epoch) gets a group with a uid of its own: `u`, `u.1`, ..."""
    prompt: RequestSpec
    """As the source of prompts gave it."""
    trajectories: tuple[Trajectory, ...]
    """One a sample, in their order, dropped ones too."""
    step: int
    """The batch it was started for; an earlier one than that it is in, where it was carried over."""

    @property
    def kept(self) -> tuple[Trajectory, ...]:
        """Those that take part: all but the dropped ones."""
        return tuple(t for t in self.trajectories if t.disposition is not Disposition.DROP)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of those that take part and have one: what a mean and a deviation are taken of."""
        return tuple(t.reward for t in self.kept if t.reward is not None)

    @property
    def num_sampled_tokens(self) -> int:
        """Of all rollouts together."""
        return sum(map(num_sampled_tokens, self.trajectories))

    def describe(self) -> str:
        """For messages: its rewards, and why the others were dropped."""
        rewards = ", ".join(f"{reward:g}" for reward in self.rewards) or "none"
        dropped = [t.stop_reason.value for t in self.trajectories if t.disposition is Disposition.DROP]
        return f"uid {self.uid}: rewards {rewards}" + (f"; dropped: {', '.join(dropped)}" if dropped else "")


KeepGroup = Callable[[Group], bool]
"""A user's own filter: whether a complete group is to be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredGroup:
    """A group that is not trained on."""

    group: Group
    reason: FilterReason


@dataclass(slots=True, kw_only=True)
class GroupCounts:
    """What became of groups. started + those carried in = trained + filtered + aborted + carried."""

    started: int = 0
    completed: int = 0
    """All their rollouts ended."""
    trained: int = 0
    filtered: int = 0
    refilled: int = 0
    """Of those started: the ones that replaced filtered groups."""
    aborted: int = 0
    """Ended, or left out although complete, because enough others were complete."""
    carried: int = 0
    """Set aside to go on with the next batch."""
    dropped_rollouts: int = 0
    """Of the groups that are trained: rollouts that take no part."""
    trained_tokens: int = 0
    """Sampled tokens of the trained groups, and of the next two kinds."""
    filtered_tokens: int = 0
    aborted_tokens: int = 0
    wait_s: float = 0.0
    """From asking for a batch to having it."""

    def add(self, other: GroupCounts) -> None:
        """Add another batch's. `carried` becomes the other's: what is carried is counted where it ends."""
        for name in (f.name for f in fields(self)):
            before = 0 if name == "carried" else getattr(self, name)
            setattr(self, name, before + getattr(other, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one training step is given."""

    step: int
    groups: tuple[Group, ...]
    """In the order in which they were started. Fewer than `groups_per_batch` only when the prompts are used up."""
    filtered: tuple[FilteredGroup, ...]
    aborted: tuple[RequestSpec, ...]
    """Prompts whose groups were aborted: nothing of them was trained. Give them again to make up for it."""
    carried: tuple[str, ...]
    """Uids of the groups that go on with the next batch."""
    counts: GroupCounts

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Everything to be trained, group by group."""
        return tuple(trajectory for group in self.groups for trajectory in group.kept)


def num_sampled_tokens(trajectory: Trajectory) -> int:
    """Tokens the model sampled, in all rows."""
    return sum(row.num_sampled_tokens for row in trajectory.rows)


def why_filtered(group: Group, config: GroupConfig, keep: KeepGroup | None) -> FilterReason | None:
    """What speaks against training on a complete group; None is nothing."""
    if len(group.kept) < min(2, config.samples_per_group):
        return FilterReason.TOO_FEW
    if config.filter == "no_variance" and not _differ(group.rewards):
        return FilterReason.NO_VARIANCE
    if keep is not None and not keep(group):
        return FilterReason.REJECTED
    return None


def aged(trajectory: Trajectory, config: RolloutConfig, weight_version: int | None) -> Trajectory:
    """A trajectory that ended for an earlier batch, as `max_staleness` and `stale` have it by now.

    One that ended is not begun anew: `restart` drops it, like `drop`.
    """
    if config.max_staleness is None or weight_version is None or trajectory.validate:
        return trajectory
    limit = weight_version - config.max_staleness
    versions = (row.oldest_weight_version for row in trajectory.rows)
    if config.stale == "train" or not any(version is not None and version < limit for version in versions):
        return trajectory
    if config.stale == "mask":
        return dataclasses.replace(trajectory, stale_before=limit)
    return dataclasses.replace(trajectory, disposition=Disposition.DROP)


def _differ(rewards: Sequence[float]) -> bool:
    return len(rewards) > 1 and max(rewards) - min(rewards) > EQUAL_REWARDS
