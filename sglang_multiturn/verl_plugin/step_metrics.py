"""What rollouts of a training step came to, in verl's own logger: under `rollout/` with V1, `timing_s/rollout/` with V0.

V1: `trainer.v1.sampler.custom_sampler.path=pkg://sglang_multiturn.verl_plugin.step_metrics`
    `trainer.v1.sampler.custom_sampler.name=replay_buffer`
    The trainer logs what its replay buffer's `sample` returns beside the batch (v1/trainer_base.py:567).
V0: `+actor_rollout_ref.rollout.agent.agent_loop_manager_class=sglang_multiturn.verl_plugin.step_metrics.CountingManager`
    The trainer logs `meta_info["timing"]` of what its manager generated (ray_trainer.py:1518), under its name for times.

Nothing of what verl samples or trains is changed by either.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.protocol import DataProto

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.verl_plugin.rows import TALLY
from sglang_multiturn.verl_plugin.tally import Tally

logger = logging.getLogger(__name__)

Sample = Callable[..., tuple[Any, dict[str, Any]]]


def replay_buffer(*, refill_fn: Callable[[int], int], **_given: Any) -> Any:
    """verl's own replay buffer, which also reports what the rollouts it samples came to.

    verl gives a custom sampler less than its own: no group filter (`algorithm.filter_groups`), no
    `sync_refill_failed_groups` (v1/trainer_base.py:165). So its trainer, of which `refill_fn` is a method, builds the buffer
    as if none were asked for.

    Raises:
        ConfigError: this verl's trainer hands itself over in another way.
    """
    trainer: Any = getattr(refill_fn, "__self__", None)
    if not hasattr(trainer, "_build_replay_buffer"):
        raise ConfigError(
            "trainer.v1.sampler.custom_sampler: this version of verl builds its replay buffer otherwise; leave the custom "
            "sampler out (journal_dir keeps every figure), or wrap a buffer of your own with with_rollout_metrics"
        )
    with _without_custom_sampler(trainer.config):
        return with_rollout_metrics(trainer._build_replay_buffer())


def with_rollout_metrics(buffer: Any) -> Any:
    """The replay buffer, whose `sample` also returns figures of the training rollouts it took: for samplers of your own."""
    original: Sample = buffer.sample

    @functools.wraps(original)
    def sample(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        batch, metrics = original(*args, **kwargs)
        return batch, metrics | _figures_of(batch)

    buffer.sample = sample
    return buffer


class CountingManager(AgentLoopManager):
    """verl's manager of agent loops for V0 and one-step-off, which also reports what the rollouts came to."""

    def _performance_metrics(self, metrics: list[list[dict[str, str]]], output: DataProto) -> dict[str, float]:
        timing: dict[str, float] = super()._performance_metrics(metrics, output)
        tallies = output.non_tensor_batch.pop(TALLY, ())
        return timing | Tally.total(numbers or {} for numbers in tallies).figures()


@contextlib.contextmanager
def _without_custom_sampler(config: Any) -> Iterator[None]:
    chosen = config.trainer.v1.sampler.custom_sampler
    path, chosen.path = chosen.path, None
    try:
        yield
    finally:
        chosen.path = path


def _figures_of(batch: Any) -> dict[str, float]:
    import transfer_queue

    if batch.partition_id == "val" or not batch.keys:
        return {}
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    rows = (getattr(fields, "data", fields) for fields in data["extra_fields"])
    tallies = (row.get(TALLY) or {} for row in rows if isinstance(row, dict))  # rows of other loops have none
    return Tally.total(tallies).figures()
