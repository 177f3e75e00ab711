"""Do something to a module once it has been imported, without importing it.

The entry point runs while verl itself is half imported, in every process that says `import verl`. What it changes stands
in heavy modules (Ray, transformers) that most of those processes never import, so it waits for them instead.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]

logger = logging.getLogger(__name__)


def after_import(name: str, action: Action) -> None:
    """Run `action` on the module `name`: now if it is imported already, else right after its own code has run.

    Whoever imports names from it afterwards gets what `action` left there.
    """
    module = sys.modules.get(name)
    if module is not None:
        _run(action, module)
        return
    _FINDER.waiting.setdefault(name, []).append(action)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _AfterImportFinder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module and adds the waiting actions to its loader."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        actions = self.waiting.pop(fullname, None)
        if actions is None:
            return None
        spec = importlib.util.find_spec(fullname)  # this finder passes now: nothing waits for that name any more
        if spec is None or spec.loader is None:
            return spec
        original = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            for action in actions:
                _run(action, module)

        # On the loader object and not a wrapper of it: `inspect` and cloudpickle ask the loader for more than this.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _AfterImportFinder()


def _run(action: Action, module: ModuleType) -> None:
    try:
        action(module)
    except Exception:  # raised from here it would break `import` of a module that is not ours
        logger.exception(
            "sglang_multiturn could not adapt %s; this version of verl may not be supported", module.__name__
        )
