"""What the `verl.plugins` entry point imports: registers the agent loop and waits for the modules to be patched.

It runs inside `import verl` (verl/__init__.py:60-81), in every process of every program that imports verl, asked for or
not. So it imports nothing heavy, changes nothing of what others see, and never raises: verl would log the failure at
DEBUG only, so it logs its own as ERROR. The CPU parts come in only where `SGLANG_MULTITURN_CPU=1` asks for them and verl
finds no accelerator on this host.
"""

from __future__ import annotations

import logging
import os

from sglang_multiturn.verl_plugin.after_import import after_import

CPU_VARIABLE = "SGLANG_MULTITURN_CPU"

logger = logging.getLogger(__name__)


def install() -> None:
    """Everything the entry point does."""
    from sglang_multiturn.verl_plugin import compat

    after_import(compat.TOOL_REGISTRY_MODULE, compat.patch_tool_loader)
    after_import(compat.AGENT_LOOP_MODULE, compat.patch_agent_loop)
    after_import(compat.AGENT_LOOP_MODULE, compat.patch_agent_loop_worker)
    after_import(compat.REPLICA_MODULE, compat.patch_replica)
    if os.environ.get(CPU_VARIABLE) == "1":
        from sglang_multiturn.cpu import verl_platform

        verl_platform.install_without_accelerator()


try:
    install()
except Exception:
    logger.exception("sglang_multiturn's verl plugin failed; `default_agent_loop=sglang_multiturn` will not be found")
