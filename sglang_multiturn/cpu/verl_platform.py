# ruff: noqa: D102 - what a platform's methods do stands in verl's PlatformBase
"""A CPU platform for verl 0.9, so that its real trainer runs on a machine without an accelerator.

For demos and tests: tokens, masks, log-probabilities and updates are real, speed figures mean nothing. verl has no CPU
platform: it falls back to `nvidia` (verl/plugin/platform/platform_manager.py:124) and then asks CUDA for everything.
`install()` puts one in and mends what still breaks; importing this module changes nothing, and torch stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

from sglang_multiturn.cpu import sglang_kernels
from sglang_multiturn.verl_plugin.after_import import after_import

logger = logging.getLogger(__name__)


def install_without_accelerator() -> bool:
    """`install()`, unless verl finds an accelerator on this host; whether it was installed."""
    if found := accelerators():
        logger.warning("SGLANG_MULTITURN_CPU=1 is ignored: this host has %s", ", ".join(found))
        return False
    install()
    return True


def accelerators() -> list[str]:
    """What is on this host, by verl's own check (platform_manager.py:108) and by torch's.

    verl's asks the host and not only this process, since Ray hides the GPUs from actors that reserved none; but it finds
    no CUDA device where `nvidia-smi` is missing (platform_cuda.py:77), and torch does.
    """
    found = ["a CUDA device"] if torch.cuda.is_available() else []
    for name in PlatformRegistry.registered_names():
        platform = PlatformRegistry.get(name)
        if (
            platform is not None
            and platform is not CpuPlatform
            and platform().is_platform_available(use_smi_check=True)
        ):
            found.append(f"platform {name!r}")
    return found


def install() -> None:
    """Make verl run on the CPU in this process. Each step says which breakage it mends."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    set_platform(CpuPlatform())
    # The FSDP engines are registered for cuda and npu only (fsdp/transformer_impl.py:1143); verl's own override
    # (engine/base.py:405) makes the lookup find the first.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    # transformers imports torchvision, and PyPI's cannot be imported beside a CPU torch (see `sglang_kernels`).
    sglang_kernels.prepare()
    after_import("verl.utils.distributed", _one_backend)
    after_import("verl.utils.fsdp_utils", _no_pinned_memory)
    after_import("verl.utils.model", _critic_without_flash_attention)
    after_import("verl.workers.rollout.base", _register_adapter)
    after_import("verl.workers.rollout.replica", _register_replica)


def _one_backend(module: types.ModuleType) -> None:
    """verl names the backend "cpu:gloo,<device>:<backend>" (distributed.py:63,91), and torch refuses a device twice.

    Under this name the second half is a gloo for a device nobody uses. The module asks for the name nowhere else.
    """
    module.get_device_name = lambda: "cuda"  # type: ignore[attr-defined]


def _no_pinned_memory(module: types.ModuleType) -> None:
    """The reference model gets CPUOffloadPolicy(pin_memory=True) (transformer_impl.py:462), which needs an accelerator.

    verl's engine imports the class from here, so torch's own stays as it is.
    """

    class UnpinnedOffloadPolicy(module.CPUOffloadPolicy):  # type: ignore[misc, name-defined]
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=False)

    module.CPUOffloadPolicy = UnpinnedOffloadPolicy  # type: ignore[attr-defined]


def _critic_without_flash_attention(module: types.ModuleType) -> None:
    """A critic is loaded with flash attention, whatever its configuration says (model.py:649), and that is CUDA's.

    verl's engine imports the function from here when it builds a critic (transformer_impl.py:291).
    """

    def load(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    if not callable(module.load_valuehead_model):
        raise TypeError("verl.utils.model.load_valuehead_model is not a function any more")
    module.load_valuehead_model = load  # type: ignore[attr-defined]


def _register_adapter(module: types.ModuleType) -> None:
    module._ROLLOUT_REGISTRY[("sglang_cpu", "async")] = "sglang_multiturn.cpu.verl_replica.CpuServerAdapter"


def _register_replica(module: types.ModuleType) -> None:
    def load() -> type[Any]:
        from sglang_multiturn.cpu.verl_replica import CpuReplica

        return CpuReplica

    module.RolloutReplicaRegistry.register("sglang_cpu", load)


class _CpuIndex(str):
    """What `torch.device` and `.to()` take, and what verl's f"{device}:{index}" formats as an index: "cpu:0"."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


class _CpuDeviceModule(types.ModuleType):
    """`torch.cpu` with the memory and random-number calls that verl makes on every device module."""

    def __init__(self) -> None:
        super().__init__("torch.cpu")

    def __getattr__(self, name: str) -> Any:
        if name in _DEVICE_CALLS:
            return _DEVICE_CALLS[name]
        return getattr(torch.cpu, name)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


_DEVICE_CALLS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), _zero),
    **dict.fromkeys(("reset_peak_memory_stats", "empty_cache", "ipc_collect", "set_device"), _nothing),
    "mem_get_info": lambda *_args: (0, 0),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "get_rng_state": lambda *_args: torch.get_rng_state(),
    "set_rng_state": lambda state, *_args: torch.set_rng_state(state),
    "get_device_name": lambda *_args: "cpu",
}


class CpuPlatform(PlatformBase):
    """One CPU "device" a process, collectives over gloo."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDeviceModule()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never found by detection, only by `install`."""
        return False

    def current_device(self) -> Any:
        return _CpuIndex("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        """verl reserves one accelerator a worker; start Ray with `num_gpus` to have that many slots."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
