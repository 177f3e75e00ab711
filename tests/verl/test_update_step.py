"""A row of every stop reason in one batch, through one real FSDP2 update of verl's actor."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.request import Disposition, StopReason

HERE = Path(__file__).parent


@pytest.mark.slow
def test_rows_of_every_stop_reason_train_together(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1] / "examples" / "gsm8k_tool")])
    done = subprocess.run(
        [sys.executable, str(HERE / "update_step.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    kept = [reason for reason in StopReason if RolloutConfig().disposition(reason) is not Disposition.DROP]
    assert seen["rows"] == len(StopReason)
    assert seen["trained_tokens"] == 5 * len(kept)  # test_rows.RESPONSE_MASK trains five tokens
    assert seen["v1_columns"] == [
        "extra_fields",
        "metrics",
        "num_turns",
        "prompts",
        "response_mask",
        "responses",
        "rm_scores",
        "rollout_log_probs",
    ]
    assert math.isfinite(seen["update"]["loss"])
    assert seen["update"]["grad_norm"] > 0
    assert seen["moved"] > 0
    assert seen["only_masked"]["grad_norm"] == 0
    assert seen["only_masked_moved_nothing"]
