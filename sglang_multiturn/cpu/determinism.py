"""SGLang's deterministic mode on a CPU: each request brings a seed, and the same seed draws the same tokens.

SGLang offers it for GPUs only: it refuses the CPU's attention backend, replaces torch's matrix kernels by Triton's, and
draws with a hash that is a Triton kernel. What is left out here is the second: a CPU's logits differ by some 1e-6 with
what else is in the batch, so that a token in a hundred thousand or so may still be drawn otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ARGUMENT = "enable_deterministic_inference"
_ALLOWED = "SGLANG_MULTITURN_CPU_DETERMINISM"
_HASHES = ("sglang.srt.layers.utils.hash", "sglang.kernels.ops.sampling.murmur_hash")
"""Where the hash stands: the first in 0.5.14, the second in 0.5.23."""
_MASK = 0xFFFFFFFF


def allow() -> None:
    """Make SGLang accept its deterministic mode on this CPU; called before its server arguments are made."""
    os.environ[_ALLOWED] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang compiles its drawing of tokens; the hash below is plain torch
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    for choices in (
        arguments.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        arguments.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if "torch_native" not in choices:
            choices.append("torch_native")


def prepare_spawned() -> None:
    """Stand in for what needs a GPU, in a process SGLang spawned; nothing where nobody asked for determinism."""
    if os.environ.get(_ALLOWED) != "1":
        return
    hashing: Any = importlib.import_module(next(name for name in _HASHES if importlib.util.find_spec(name)))
    hashing.murmur_hash32 = murmur_hash32
    kernels: Any = importlib.import_module("sglang.srt.batch_invariant_ops.batch_invariant_ops")
    kernels._batch_invariant_MODE = True  # it takes its Triton kernels for put in already


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits) of seed, position and column, as SGLang's kernel computes it.

    Args:
        seed: 64-bit integers, shape [n].
        positions: integers below 2**32, shape [n].
        col_indices: the same, shape [m].

    Returns:
        32-bit hashes in 64-bit integers, shape [n, m].
    """
    import torch

    seeds = seed.to(torch.int64)[:, None]
    hashed = torch.zeros_like(seeds)
    for block in (seeds & _MASK, (seeds >> 32) & _MASK, positions[:, None], col_indices[None, :]):
        hashed = _mixed(hashed, block.to(torch.int64))
    hashed = hashed ^ 16  # bytes that were hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _MASK
    return hashed ^ (hashed >> 16)


def _mixed(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (_rotated((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotated(bits: torch.Tensor, by: int) -> torch.Tensor:
    return ((bits << by) | (bits >> (32 - by))) & _MASK
