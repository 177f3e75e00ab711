"""The mask ablation's loss: its arithmetic by hand, beside verl's, and what the mask keeps out of the gradient."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_multiturn import BaseTool, Trajectory
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

from support import call, roll

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from grpo_loop import Kind, Learner, LossOn, OldLogprobs, cosine, group_advantages, make_batch, policy_loss  # noqa: E402

VOCABULARY = 512


class Shout(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return parameters["text"].upper(), 0.0, {}


SHOUT = Shout({}, ToolSchema(function=FunctionSchema(name="shout", description="", parameters={"type": "object"})))


class Bigram(torch.nn.Module):
    """The next token depends on the last one only: row `t` of the weights is what follows token `t`."""

    def __init__(self) -> None:
        super().__init__()
        self.follows = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        torch.nn.init.zeros_(self.follows.weight)

    def forward(self, input_ids: Any, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.follows(input_ids))


async def a_good_and_a_bad_one() -> list[Trajectory]:
    """One asks the tool, which says "ZQ" as nobody else does, and then answers; the other says "no" at once."""
    good = await roll([call("shout", text="zq"), "yes"], [SHOUT], reward_fn=lambda *_, **__: 1.0)
    return [good, await roll(["no"], [SHOUT], reward_fn=lambda *_, **__: 0.0)]


def test_advantages_are_distances_from_the_groups_mean_in_its_deviations() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5], ["a", "a", "a", "a", "b", "b", "c"]
    # Group a: mean 0.25, deviation 0.5. Group b does not differ. Group c is one rollout, whose mean is taken as 0.
    expected = [1.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.5]
    assert group_advantages(rewards, groups) == pytest.approx(expected, abs=1e-5)
    assert group_advantages(rewards, groups)[4:6] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 1.0, -1.1),
        (1.5, 1.0, -1.2),  # enough: no more than a fifth above
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.8),  # enough: no more than a fifth below
        (2.0, -1.0, 2.0),
        (5.0, -1.0, 3.0),  # the dual clip
    ],
)
def test_the_loss_of_a_token_is_clipped(ratio: float, advantage: float, loss: float) -> None:
    logprobs = torch.tensor([[ratio]]).log()
    assert policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage])).item() == pytest.approx(loss)


def test_the_learning_rate_falls_along_a_cosine_to_a_tenth() -> None:
    assert [cosine(step, 30) for step in (0, 15, 30)] == pytest.approx([1.0, 0.55, 0.1])


async def test_the_mask_is_all_that_differs_between_the_two_batches() -> None:
    on, off = [make_batch(await a_good_and_a_bad_one(), loss_on, pad_id=0) for loss_on in LossOn]
    for name in ("ids", "kinds", "rollout_logprobs", "advantages"):
        assert torch.equal(getattr(on, name), getattr(off, name)), name
    assert torch.equal(on.trained, on.kinds == Kind.SAMPLED)
    assert torch.equal(off.trained, off.kinds != Kind.NONE)
    assert on.advantages.tolist() == pytest.approx([-(2**-0.5), 2**-0.5], abs=1e-5)  # the short row comes first
    assert bytes(on.ids[1][on.kinds[1] == Kind.TOOL].tolist()) == b"ZQ"
    assert (on.kinds[0, -1].item(), on.kinds[1, -1].item()) == (Kind.NONE, Kind.SAMPLED)


@pytest.mark.parametrize(("loss_on", "moved"), [(LossOn.SAMPLED, False), (LossOn.EVERYTHING, True)])
async def test_only_without_the_mask_do_a_tools_words_move_the_weights(loss_on: LossOn, moved: bool) -> None:
    learner = Learner(Bigram(), steps=1, rate=1e-3, old_logprobs=OldLogprobs.RECOMPUTED)
    update = learner.update(make_batch(await a_good_and_a_bad_one(), loss_on, pad_id=0))
    what_follows_z = learner.model.follows.weight.grad[ord("Z")]
    assert (what_follows_z[ord("Q")].item() < 0) is moved  # downhill is up: "ZQ" becomes likelier
    assert bool(what_follows_z.any()) is moved
    assert (update.grad_norm_not_sampled > 0) is moved
    assert (update.not_sampled_fraction > 0) is moved


async def test_an_update_has_the_gradient_of_the_mean_over_all_trained_tokens() -> None:
    learner = Learner(Bigram(), steps=1, rate=1e-3, old_logprobs=OldLogprobs.RECOMPUTED)
    update = learner.update(make_batch(await a_good_and_a_bad_one(), LossOn.SAMPLED, pad_id=0))
    # "y" is said once, and "e" after it, in the row whose advantage is 1 / sqrt(2).
    share = 2**-0.5 / update.trained_tokens
    expected = torch.full((VOCABULARY,), share / VOCABULARY)
    expected[ord("e")] -= share
    assert learner.model.follows.weight.grad[ord("y")].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert update.logprob_sampled == pytest.approx(-torch.tensor(float(VOCABULARY)).log().item(), rel=1e-5)


async def test_a_batch_without_differences_has_no_gradient() -> None:
    good, _ = await a_good_and_a_bad_one()
    learner = Learner(Bigram(), steps=1, rate=1e-3, old_logprobs=OldLogprobs.ROLLOUT)
    update = learner.update(make_batch([good, good], LossOn.EVERYTHING, pad_id=0))
    assert (update.grad_norm, update.logprob_sampled) == (0.0, None)
    assert not learner.model.follows.weight.any()


async def test_a_row_without_a_reward_is_refused() -> None:
    trajectory = await roll(["yes"])
    with pytest.raises(ValueError, match="request r: it has no reward"):
        make_batch([trajectory], LossOn.SAMPLED, pad_id=0)


def test_advantages_and_losses_are_verls() -> None:
    os.environ.setdefault("SGLANG_MULTITURN_CPU", "1")  # lets verl be imported where there is no accelerator
    pytest.importorskip("verl")
    import numpy as np
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (32,), generator=generator).float()
    groups = [str(index % 5) for index in range(32)]
    mask = torch.rand(32, 40, generator=generator) < 0.5
    mask[:, 0] = True
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        torch.nn.functional.pad(rewards[:, None], (0, 39)), mask, np.array(groups)
    )
    ours = torch.tensor(group_advantages(rewards.tolist(), groups))
    assert torch.allclose(theirs, ours[:, None] * mask, atol=1e-5)
    old, new = (-2 * torch.rand(32, 40, generator=generator) for _ in range(2))
    config = ActorConfig(strategy="fsdp2", rollout_n=8, ppo_micro_batch_size_per_gpu=32)
    expected, _ = core_algos.compute_policy_loss_vanilla(old, new, theirs, mask, "token-mean", config)
    assert (policy_loss(new, old, ours)[mask].sum() / mask.sum()).item() == pytest.approx(expected.item(), rel=1e-5)
