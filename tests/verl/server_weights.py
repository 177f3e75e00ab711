"""Other weights for the server under test, and whose log-probabilities a span of tokens has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

Span = tuple[int, list[int], list[int], list[float]]
"""Version, input ids, sampled ids, their log-probabilities."""


class Weights:
    """Sets of weights that differ in one tensor."""

    def __init__(self, server: Any, manager: Any, model: Path) -> None:
        from safetensors.numpy import load_file

        self._server, self._manager = server, manager
        tensors = load_file(model / "model.safetensors")
        self._name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
        self._tensor = tensors[self._name]

    async def load(self, version: int) -> None:
        from sglang_multiturn.engine.sglang_child.weights import replace_tensors

        await self._server._until_idle()
        tensor = (self._tensor * (1 + 0.1 * version)).astype(self._tensor.dtype)
        await replace_tensors(self._manager, [(self._name, tensor)], version)
        await self._manager.flush_cache()
        await self._server.set_global_steps(version)

    async def compare(self, spans: list[Span]) -> tuple[float, float]:
        """The largest difference under each span's own weights, and the same under weights of one version later."""
        worst = other = 0.0
        for version in sorted({version for version, *_ in spans}):
            mine = [span for span in spans if span[0] == version]
            await self.load(version)
            worst = max(worst, await self._largest_difference(mine))
            await self.load(version + 1)
            other = max(other, await self._largest_difference(mine[:1]))
        return worst, other

    async def _largest_difference(self, spans: list[Span]) -> float:
        async with asyncio.TaskGroup() as tasks:
            differences = [tasks.create_task(self._difference(span)) for span in spans]
        return max(task.result() for task in differences)

    async def _difference(self, span: Span) -> float:
        from sglang.srt.managers.io_struct import GenerateReqInput

        _, given, sampled, logprobs = span
        request = GenerateReqInput(
            input_ids=[*given, *sampled],
            sampling_params={"temperature": 1.0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=len(given) - 1,
        )
        outputs = [output async for output in self._manager.generate_request(request, None)]
        known = [entry[0] for entry in outputs[-1]["meta_info"]["input_token_logprobs"]][-len(sampled) :]
        return max(abs(a - b) for a, b in zip(logprobs, known, strict=True))
