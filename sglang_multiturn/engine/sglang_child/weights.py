"""Inside the child: how new weights reach SGLang, checked before it sees them, since it does not survive wrong ones.

In SGLang 0.5.14 a tensor of an unknown name is skipped in silence, one of a wrong shape ends the scheduler, and the
rollback after a broken checkpoint reads that same checkpoint again. So names and shapes are compared with those of the
checkpoint the engine was started from; a model without safetensors files cannot be checked.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_multiturn.errors import WeightUpdateError

if TYPE_CHECKING:
    import numpy as np
    import torch

Shapes = Mapping[str, tuple[int, ...]]

_HEADER_LENGTH = struct.Struct("<Q")
_MAX_NAMED = 3


def checkpoint_shapes(model_path: str) -> Shapes | None:
    """Name and shape of every tensor of a checkpoint; None where it has no safetensors files."""
    folder = Path(model_path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model_path, "config.json")
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= _file_shapes(file)
    return shapes or None


def check_tensors(expected: Shapes | None, named_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Refuse names the model does not have and shapes that differ.

    Raises:
        WeightUpdateError: naming the first few.
    """
    if expected is None:
        return
    problems = [
        f"{name} is not a weight of this model"
        if name not in expected
        else f"{name} has shape {list(shape)}, the model's is {list(expected[name])}"
        for name, shape in named_shapes
        if expected.get(name) != shape
    ]
    _raise_any(problems)


def check_checkpoint(expected: Shapes | None, model_path: str) -> None:
    """Refuse a folder that does not hold every weight of the model, in its shape, and no other.

    Raises:
        WeightUpdateError: saying what is wrong with it.
    """
    if not (Path(model_path) / "config.json").is_file():
        raise WeightUpdateError(f"{model_path} is not a model folder: it has no config.json")
    if expected is None:
        return
    found = checkpoint_shapes(model_path)
    if found is None:
        raise WeightUpdateError(f"{model_path} holds no readable *.safetensors file")
    check_tensors(expected, found.items())
    _raise_any([f"{name} is missing in {model_path}" for name in expected if name not in found])


def without_tied_head(expected: Shapes | None, tensors: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Drop the output head a `state_dict` repeats although the checkpoint ties it to the embedding."""
    if expected is None or "lm_head.weight" in expected:
        return tensors
    return [(name, array) for name, array in tensors if name != "lm_head.weight"]


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The same numbers as a tensor. bfloat16, which numpy has only through ml_dtypes, goes over by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


async def replace_tensors(manager: Any, tensors: list[tuple[str, np.ndarray]], weight_version: int) -> None:
    """Load these tensors into every rank; nothing may be generating.

    Raises:
        WeightUpdateError: SGLang refused them.
    """
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    named = [(name, to_torch(array)) for name, array in tensors]
    async with _update_session(manager):
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize(named) for _ in range(manager.server_args.tp_size)
            ],
            flush_cache=False,
            weight_version=str(weight_version),
        )
        _raise_refusal(await manager.update_weights_from_tensor(update, None))


async def replace_from_disk(manager: Any, model_path: str, weight_version: int) -> None:
    """Load a checkpoint's weights; nothing may be generating.

    Raises:
        WeightUpdateError: SGLang refused them.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    update = UpdateWeightFromDiskReqInput(model_path=model_path, flush_cache=False, weight_version=str(weight_version))
    _raise_refusal(await manager.update_weights_from_disk(update, None))


@contextlib.asynccontextmanager
async def _update_session(manager: Any) -> AsyncIterator[None]:
    """SGLang takes tensors only between `begin_weight_update` and `end_weight_update`, from the version on that has them."""
    if not hasattr(manager, "begin_weight_update"):
        yield
        return
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    _raise_refusal(await manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
    try:
        yield
    finally:
        _raise_refusal(await manager.end_weight_update(EndWeightUpdateReqInput(), None))


def _raise_refusal(result: tuple[Any, ...]) -> None:
    """SGLang answers a failed update, it does not raise."""
    success, message, *_ = result
    if not success:
        raise WeightUpdateError(f"SGLang refused the new weights: {message}")


def _file_shapes(file: Path) -> Shapes:
    with file.open("rb") as stream:
        prefix = stream.read(_HEADER_LENGTH.size)
        try:
            (length,) = _HEADER_LENGTH.unpack(prefix)
            header = json.loads(stream.read(length)) if length < file.stat().st_size else None
        except (struct.error, ValueError):
            header = None
    if not isinstance(header, dict):
        raise WeightUpdateError(f"{file} is not a safetensors file")
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _raise_any(problems: list[str]) -> None:
    if problems:
        more = len(problems) - _MAX_NAMED
        raise WeightUpdateError("; ".join(problems[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else ""))
