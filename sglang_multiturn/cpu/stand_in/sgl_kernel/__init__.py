"""A plain-torch stand-in for SGLang's compiled kernels, on a CPU for which none are published.

SGLang takes its own plain-torch path in every layer when `SGLANG_USE_CPU_ENGINE=1` and the CPU has no AMX; what it still
asks of `sgl_kernel` is bookkeeping. Any other kernel can be imported, so that SGLang's modules load, and raises
NotImplementedError naming itself when it is called: nothing is ever computed wrongly in silence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+sglang.multiturn.stand.in"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,
) -> None:
    """Write the cache slots of each request's new tokens into its row."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move cache slots in every layer; all sources are read before the first target is written, as they may overlap."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no stand-in for a CPU without AMX; this model or setting needs the real kernels"
        )

    missing.__name__ = missing.__qualname__ = name
    return missing
