"""SGLang's own process: `python -m sglang_multiturn.engine.sglang_child.main FD PARENT_PID`, started by SGLangEngine.

SGLang kills the process tree it lives in when something goes wrong, so it gets one of its own. Invariant: the tree ends
with its parent, however the parent ends.

SGLang spawns its workers from this module, imported as `__mp_main__`; that is how the CPU stand-ins reach them. Hence
nothing heavy is imported at module level.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from sglang_multiturn.cpu import determinism, sglang_kernels
from sglang_multiturn.engine.sglang_child.messages import (
    START_ID,
    Failure,
    FailureKind,
    Reply,
    Request,
    Start,
    Started,
    encode,
    read_message_blocking,
)
from sglang_multiturn.errors import EngineStartError

if TYPE_CHECKING:
    from sglang_multiturn.engine.sglang_child.launch import Launched

_PARENT_POLL_S = 1.0


def main() -> int:
    """Start SGLang as the parent's first message says, then serve until the parent is done or gone."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent_pid,), name="parent-watch", daemon=True).start()
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    request = read_message_blocking(sock)
    assert isinstance(request, Request)
    assert isinstance(request.body, Start)
    launched = _launch(request.body, sock)
    if launched is None:
        return 1
    launched.engine.loop.run_until_complete(_serve(launched, request.body.model_path, sock))
    launched.engine.shutdown()
    sys.stdout.flush()
    # The workers are gone; tearing down the interpreter with torch in it takes seconds and does nothing of use.
    os._exit(0)


def _launch(start: Start, sock: socket.socket) -> Launched | None:
    from sglang_multiturn.engine.sglang_child.launch import launch

    try:
        return launch(start)
    except EngineStartError as error:
        reason = str(error)
    # Whatever keeps SGLang from starting is the parent's to report; the log keeps the traceback.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    sock.sendall(encode(Reply(message_id=START_ID, body=Failure(kind=FailureKind.START, message=reason))))
    return None


async def _serve(launched: Launched, model_path: str, sock: socket.socket) -> None:
    from sglang_multiturn.engine.sglang_child.serve import Server

    reader, writer = await asyncio.open_unix_connection(sock=sock)
    server = Server(launched, model_path, writer)
    started = Started(info=launched.info, honours_seed=launched.honours_seed)
    writer.write(encode(Reply(message_id=START_ID, body=started)))
    await server.serve(reader)


def _end_with(parent_pid: int) -> None:
    """Kill the whole group of this process once its parent is another one than the one that started it.

    The socket alone would not do: nobody reads it while SGLang starts, and forked siblings may hold its other end open.
    """
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__mp_main__":
    sglang_kernels.prepare_spawned()
    determinism.prepare_spawned()

if __name__ == "__main__":
    sys.exit(main())
