"""SGLang's log-probabilities are those a trainer computes: transformers' in float32, temperature-scaled, untruncated."""

from __future__ import annotations

from typing import Any

import pytest
from engine.subjects import TINY_MODEL, Subject, new_id

from sglang_multiturn.cpu.sglang_kernels import declare_torchvision_operators
from sglang_multiturn.engine.base import Generation, GenerationId, SamplingParams

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = list(range(100, 140))
MAX_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def reference() -> Any:
    declare_torchvision_operators()  # transformers imports torchvision, which PyPI has for CUDA only
    return transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()


def _reference_logprobs(reference: Any, generation: Generation, temperature: float) -> Any:
    ids = torch.tensor([[*PROMPT, *generation.token_ids]])
    with torch.no_grad():
        logits = reference(ids).logits[0, len(PROMPT) - 1 : -1].float()
    sampled = torch.tensor(list(generation.token_ids))
    return (logits / temperature).log_softmax(-1)[torch.arange(len(sampled)), sampled]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, max_new_tokens=64),
        SamplingParams(temperature=0.7, max_new_tokens=64),
        SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=64),
    ],
    ids=["t1.0", "t0.7", "t0.7-p0.9"],
)
async def test_logprobs_equal_those_of_transformers(
    sglang_subject: Subject, reference: Any, params: SamplingParams
) -> None:
    difference = 0.0
    for _ in range(4):
        generation = await sglang_subject.engine.generate(GenerationId(new_id("r"), 0), PROMPT, params)
        expected = _reference_logprobs(reference, generation, params.temperature)
        difference = max(difference, (torch.tensor(generation.logprobs) - expected).abs().max().item())
    assert difference <= MAX_DIFFERENCE


async def test_greedy_ids_equal_those_of_transformers(sglang_subject: Subject, reference: Any) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=32)
    generation = await sglang_subject.engine.generate(GenerationId(new_id("r"), 0), PROMPT, params)
    ids = [*PROMPT, *generation.token_ids]
    with torch.no_grad():
        chosen = reference(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert chosen.tolist() == list(generation.token_ids)
    expected = _reference_logprobs(reference, generation, 1.0)
    assert (torch.tensor(generation.logprobs) - expected).abs().max().item() <= MAX_DIFFERENCE
