"""A Ray job of one machine for the tests of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ray_job() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'tools'}"}
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()
