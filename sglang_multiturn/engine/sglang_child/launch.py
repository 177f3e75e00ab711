"""Inside the child: turns our settings into SGLang's, and starts it.

Only arguments that the installed `ServerArgs` knows are ever passed: ours are left out where it does not, the user's are
refused with a suggestion. What a CPU needs is set here and can be overridden through `server_args`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_multiturn.cpu import determinism, sglang_kernels
from sglang_multiturn.engine.base import EngineInfo
from sglang_multiturn.errors import EngineStartError

if TYPE_CHECKING:
    from sglang_multiturn.engine.sglang_child.messages import Start

_OURS = ("model_path", "dtype", "device", "context_length", "random_seed")
_CPU_MIN_TOKENS = 16_384
_CPU_CONTEXTS = 4


class Launched(NamedTuple):
    """A running SGLang and what it says of itself."""

    engine: Any
    info: EngineInfo
    honours_seed: bool
    """SGLang reads a request's seed only in its deterministic mode."""


def launch(start: Start) -> Launched:
    """Start SGLang in this process and its children; torch and sglang are imported here, not before.

    Raises:
        EngineStartError: an argument is unknown or belongs to SGLangEngine itself.
        Exception: whatever SGLang raises.
    """
    # Log-probabilities are those of the temperature-scaled distribution; this variable would change that.
    os.environ.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
    device = start.device or _best_device()
    notice = sglang_kernels.prepare() if device == "cpu" else None
    if device == "cpu" and start.server_args.get(determinism.ARGUMENT):
        determinism.allow()
    import sglang
    from sglang.srt.server_args import ServerArgs

    # By its signature: a dataclass in 0.5.14, a msgspec Struct in 0.5.23.
    known = set(inspect.signature(ServerArgs).parameters)
    engine = sglang.Engine(**engine_arguments(start, device=device, known=known))
    manager = engine.tokenizer_manager
    info = EngineInfo(
        name=f"sglang {sglang.__version__}",
        vocab_size=manager.model_config.vocab_size,
        # SGLang refuses inputs from here on and shortens generations a few tokens later, both below the model's context:
        # up to this length, input and new tokens together, it does exactly what it was asked.
        max_model_len=manager.max_req_input_len,
        kv_capacity_tokens=_kv_capacity(engine),
        device=device,
        notice=notice,
    )
    return Launched(engine, info, honours_seed=_honours_seed(manager))


def engine_arguments(start: Start, *, device: str, known: Collection[str]) -> dict[str, object]:
    """Everything `sglang.Engine` is called with.

    Raises:
        EngineStartError: `server_args` holds a key SGLang does not know, or one that is an argument of SGLangEngine.
    """
    _refuse_unknown(start.server_args, known)
    ours: dict[str, object] = {
        "model_path": start.model_path,
        "dtype": start.dtype,
        "device": device,
        "context_length": start.context_length,
        "random_seed": start.random_seed,
        "weight_version": "0",
        "log_level": "warning",
    }
    if device == "cpu":
        ours |= _cpu_arguments(start)
    return {name: value for name, value in ours.items() if name in known} | dict(start.server_args)


def _cpu_arguments(start: Start) -> dict[str, object]:
    context = start.context_length or _model_context(start.model_path)
    return {
        "dtype": "float32" if start.dtype == "auto" else start.dtype,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        # The overlapped scheduler hides the launch of GPU kernels; on a CPU it costs about as much as the model itself.
        "disable_overlap_schedule": True,
        # Left to itself SGLang takes most of the machine's memory for its cache.
        "max_total_tokens": max(_CPU_MIN_TOKENS, _CPU_CONTEXTS * context),
        "max_running_requests": 64,
    }


def _model_context(model_path: str) -> int:
    """Context length of a local model folder; 0 where it cannot be read."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return 0
    config = json.loads(file.read_text())
    context = config.get("text_config", config).get("max_position_embeddings", 0)
    return int(context)


def _refuse_unknown(server_args: Collection[str], known: Collection[str]) -> None:
    for name in server_args:
        if name in _OURS:
            raise EngineStartError(f"server_args: {name!r} is an argument of SGLangEngine; give it there")
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise EngineStartError(f"server_args: SGLang's ServerArgs has no {name!r}{hint}")


def _kv_capacity(engine: Any) -> int | None:
    """Tokens its caches hold, those of all data-parallel replicas together; None where it does not say."""
    told = engine.get_server_info()
    tokens = told.get("max_total_num_tokens")
    return None if tokens is None else int(tokens) * int(told.get("dp_size") or 1)


def _honours_seed(manager: Any) -> bool:
    known = inspect.signature(manager.sampling_params_class).parameters
    return "sampling_seed" in known and getattr(manager.server_args, "enable_deterministic_inference", False)


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
