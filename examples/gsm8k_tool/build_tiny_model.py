"""Build the demo's model from nothing: a Qwen3 of 0.8 M parameters that calls a calculator and is not yet good at it.

    python examples/gsm8k_tool/build_tiny_model.py --out examples/gsm8k_tool/tiny_model

takes about six minutes on one CPU core. There are two phases. First the model copies random tokens, short runs before
long ones: without this, a model this small takes far longer to find out how to carry a number from the question into a
call. Then it is taught the conversations of `tiny_demos.py`, a mixture poor on purpose, which leaves something for
reinforcement learning to do. The weights are saved as float16; load them as float32.

Three things that look like details and are not:

- `model_type` is qwen3, because for qwen2 transformers silently replaces the tokenizer's splitting rule by Qwen2's own.
- Weights start at a deviation of hidden^-0.5. The usual 0.02 gives attention near-zero logits at this width.
- The prompts taught are those of `tool_configs/calculator.yaml`, rendered by the chat template that is saved along.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from tiny_demos import Mixture, demonstrate, encode
from tiny_tokenizer import build_tokenizer
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config
from word_problems import HELDOUT_COUNT, HELDOUT_SEED, Problem, problems

from sglang_multiturn.cpu.sglang_kernels import declare_torchvision_operators

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

HERE = Path(__file__).parent
CALCULATOR_YAML = HERE.parents[1] / "tool_configs" / "calculator.yaml"
TEACHING_SEED = 3
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 128, 3, 2, 384
LONGEST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how hard each phase trains."""

    copying_steps: int = 300
    teaching_steps: int = 600
    batch_size: int = 48
    learning_rate: float = 2e-3
    seed: int = 0

    def teaching_rate(self, step: int) -> float:
        """The teaching phase's learning rate: a short climb, then down to a twentieth."""
        return self.learning_rate * min(1.0, (step + 1) / 50) * max(0.05, 1 - step / self.teaching_steps)


def tool_schemas(config: Path) -> list[dict[str, Any]]:
    """The tool schemas of a tool config, as written and in the order written, which is how prompts show them."""
    return [tool["tool_schema"] for tool in yaml.safe_load(config.read_text(encoding="utf-8"))["tools"]]


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A fresh model for the tokenizer's vocabulary."""
    declare_torchvision_operators()  # transformers' models import torchvision, which must not fail beside a CPU torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=HIDDEN**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * LAYERS) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * LAYERS) ** -0.5)
    return model


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor, rate: float) -> None:
    """One optimizer step at the rate given."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def copying_loss(model: Qwen3ForCausalLM, step: int, rng: random.Random, generator: torch.Generator) -> torch.Tensor:
    """The loss of repeating a run of random tokens after a gap; runs and gaps grow with the steps."""
    rows, longest = 96, 2 + min(14, step // 15)
    length, gap = rng.randint(2, longest), rng.randint(0, longest // 2)
    vocabulary = model.config.vocab_size
    run = torch.randint(0, vocabulary, (rows, length), generator=generator)
    between = torch.randint(0, vocabulary, (rows, gap), generator=generator)
    ids = torch.cat([run, between, run], dim=1)
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=length - 1).logits
    return functional.cross_entropy(logits.flatten(0, 1), run[:, 1:].flatten())


def teaching_problems(seed: int) -> Iterator[Problem]:
    """Problems to teach from: without end, and none whose question is held out."""
    heldout = {problem.question for _, problem in zip(range(HELDOUT_COUNT), problems(HELDOUT_SEED), strict=False)}
    return (problem for problem in problems(seed) if problem.question not in heldout)


def padded(conversations: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and masks as two matrices, padded on the right."""
    width = max(len(ids) for ids, _ in conversations)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in conversations])
    masks = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in conversations])
    return ids, masks


def teaching_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The mean loss of what the assistant has to say; prompts and tool replies teach nothing."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    trained = masks[:, 1:].bool()
    return functional.cross_entropy(model.lm_head(hidden[trained]), ids[:, 1:][trained])


def run_phase(name: str, steps: int, one_step: Callable[[int], torch.Tensor]) -> None:
    """Run `one_step` for each step, with a progress bar that shows the loss."""
    with tqdm(range(steps), desc=name, unit="step") as bar:
        for step in bar:
            loss = one_step(step)
            if step % 20 == 0 or step == steps - 1:
                bar.set_postfix(loss=f"{loss.item():.3f}")


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tools: list[dict[str, Any]],
    schedule: Schedule,
    mixture: Mixture,
) -> None:
    """Both phases, one optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng = random.Random(schedule.seed)
    generator = torch.Generator().manual_seed(schedule.seed)
    source = teaching_problems(TEACHING_SEED + schedule.seed)

    def copying(step: int) -> torch.Tensor:
        loss = copying_loss(model, step, rng, generator)
        update(optimizer, loss, schedule.learning_rate * min(1.0, (step + 1) / 30))
        return loss

    def teaching(step: int) -> torch.Tensor:
        conversations = [
            encode(tokenizer, demonstrate(next(source), mixture.draw(rng), rng), tools)
            for _ in range(schedule.batch_size)
        ]
        loss = teaching_loss(model, *padded(conversations, tokenizer.pad_token_id))
        update(optimizer, loss, schedule.teaching_rate(step))
        return loss

    model.train()
    run_phase("copying", schedule.copying_steps, copying)
    run_phase("teaching", schedule.teaching_steps, teaching)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint: float16 weights, config, generation config, tokenizer and chat template."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner may read


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    default = Schedule()
    parser = argparse.ArgumentParser(
        description="Build the demo's tokenizer and model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "tiny_model", help="folder to write the checkpoint to")
    parser.add_argument("--tools", type=Path, default=CALCULATOR_YAML, help="tool config whose schemas prompts show")
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of weights, problems and mixture")
    parser.add_argument("--copying-steps", type=int, default=default.copying_steps, help="steps of random copying")
    parser.add_argument("--teaching-steps", type=int, default=default.teaching_steps, help="steps on the mixture")
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="conversations a step")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate, help="highest learning rate")
    parser.add_argument(
        "--mixture",
        type=float,
        nargs=4,
        default=list(astuple(Mixture())),
        metavar=("GOOD", "GUESS", "WRONG", "EARLY"),
        help="weights of good, guessing, wrongly operating and early ending conversations",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads torch may use")
    return parser.parse_args()


def main() -> None:
    """Build and save."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    schedule = Schedule(
        copying_steps=arguments.copying_steps,
        teaching_steps=arguments.teaching_steps,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    tools = tool_schemas(arguments.tools)
    tokenizer = build_tokenizer(tools)
    model = build_model(tokenizer, schedule.seed)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters")
    train(model, tokenizer, tools, schedule, Mixture(*arguments.mixture))
    save(model, tokenizer, arguments.out)
    print(f"saved to {arguments.out}")


if __name__ == "__main__":
    main()
