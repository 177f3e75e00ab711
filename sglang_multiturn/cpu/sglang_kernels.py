"""Lets SGLang run on a CPU for which no kernels are published: demos and tests, not speed.

`prepare` is called in the process that will import sglang, before it does; `prepare_spawned` again in the processes
SGLang spawns, which inherit the environment and `sys.path` but none of torch's registrations.
A real `sgl_kernel` always wins: the stand-in's folder is appended to `sys.path`, and only where none is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_STAND_IN_FOLDER = Path(__file__).parent / "stand_in"
_PREPARED = "SGLANG_MULTITURN_CPU_STAND_IN"

NOTICE = (
    "no compiled SGLang kernels for this CPU: plain-torch ones stand in, for demos and tests; "
    "tokens and log-probabilities are real, speed figures mean nothing"
)

_keep_alive: list[object] = []


def prepare() -> str | None:
    """Make sglang importable and usable on this CPU; the line a user should see, or None where nothing stood in."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # One thread: tiny models lose more to thread wake-ups than they win, by a factor of five on two cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if importlib.util.find_spec("sgl_kernel") is not None:
        return None
    sys.path.append(str(_STAND_IN_FOLDER))
    os.environ[_PREPARED] = "1"
    prepare_spawned()
    return NOTICE


def prepare_spawned() -> None:
    """Repeat in a spawned process what `prepare` did in its parent; nothing where it did nothing."""
    if os.environ.get(_PREPARED) == "1":
        declare_torchvision_operators()


def declare_torchvision_operators() -> None:
    """Declare the operators torchvision expects of its C extension, where that cannot load.

    PyPI's torchvision is built against CUDA; beside a CPU torch its extension does not load, and `import torchvision`
    then fails on operators nobody registered. sglang imports it and never calls them. Safe to call twice.
    """
    if _keep_alive:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    torch: Any = importlib.import_module("torch")
    try:
        for extension in Path(spec.submodule_search_locations[0]).glob("_C*.so"):
            torch.ops.load_library(extension)
            return
    except OSError:
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep_alive.append(library)  # the declarations end with the object


def prepare_on_cpu() -> None:
    """`prepare` where torch sees no accelerator: for a process that imports parts of sglang without an engine.

    Safe to call twice, and in a process that inherited the environment of a prepared one but not its `sys.path`.

    Raises:
        ImportError: torch or sglang is not installed.
    """
    torch: Any = importlib.import_module("torch")
    if importlib.util.find_spec("sglang") is None:
        raise ImportError("sglang is not installed")
    if not torch.cuda.is_available():
        prepare()
        prepare_spawned()
