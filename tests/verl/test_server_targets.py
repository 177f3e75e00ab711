"""Everything of verl's server, client and SGLang that aborting by rid relies on. One of these fails when it moves."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("sglang")

from verl.workers.rollout import llm_server, replica, router

from sglang_multiturn.verl_plugin.flights import Ending, Flights
from sglang_multiturn.verl_plugin.routes import RoutedClient

Python = Callable[..., CompletedProcess[str]]

CLASSES = """
import json
from sglang_multiturn.cpu import sglang_kernels
sglang_kernels.prepare()
from verl.workers.rollout.replica import RolloutReplicaRegistry, get_rollout_replica_class
from verl.workers.rollout.sglang_rollout import async_sglang_server as verls
ours = get_rollout_replica_class("sglang")
pd = get_rollout_replica_class("sglang", disaggregation_enabled=True)
print(json.dumps(dict(
    ours=f"{ours.__module__}.{ours.__name__}",
    is_verls=issubclass(ours, verls.SGLangReplica),
    pd=pd.__module__,
    other=get_rollout_replica_class("sglang_cpu").__name__,
)))
"""
WITHOUT_OURS = """
import sys
sys.modules["sglang_multiturn.verl_plugin.server"] = None  # importing it fails, as where verl's server is another
from sglang_multiturn.cpu import sglang_kernels
sglang_kernels.prepare()
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_rollout_replica_class("sglang").__module__)
"""


def test_verls_name_for_sglang_means_our_replica_and_disaggregation_keeps_verls(run_python: Python) -> None:
    done = run_python(CLASSES, SGLANG_MULTITURN_CPU="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "ours": "sglang_multiturn.verl_plugin.server.SglangReplica",
        "is_verls": True,
        "pd": "verl.workers.rollout.sglang_rollout.sglang_pd_replica",
        "other": "CpuReplica",
    }


def test_a_verl_whose_server_cannot_be_extended_keeps_its_own_and_says_so(run_python: Python) -> None:
    done = run_python(WITHOUT_OURS, SGLANG_MULTITURN_CPU="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "verl.workers.rollout.sglang_rollout.async_sglang_server"
    assert "generations cannot be aborted" in done.stderr


def test_the_registry_is_the_one_that_is_patched() -> None:
    assert replica.RolloutReplicaRegistry._registry["sglang"].__wrapped__ is replica._load_sglang


def test_verls_client_asks_for_a_server_and_hands_keywords_on() -> None:
    source = inspect.getsource(llm_server.LLMServerClient.generate)
    assert "await self._acquire_server(\n            request_id," in source
    assert "server.generate.remote(" in source
    assert source.count("**kwargs,") >= 2
    assert "request_id: str, **extra" in inspect.getsource(llm_server.LLMServerClient._acquire_server)
    assert list(inspect.signature(llm_server.LLMServerClient._release_server).parameters)[:2] == ["self", "server_id"]


def test_verls_async_client_asks_again_only_on_words_that_are_none_of_ours() -> None:
    source = inspect.getsource(llm_server.FullyAsyncLLMServerClient.generate)
    assert 'if output.stop_reason not in ("aborted", "abort") or not should_retry' in source
    assert not {"aborted", "abort"} & set(Ending)


def test_verls_balancer_still_counts_until_a_server_is_released() -> None:
    balancer = router.GlobalRequestLoadBalancer({"one": object()})
    balancer.acquire_server("r1")
    assert balancer.get_total_inflight() == 1
    balancer.release_server("one", request_id="r1")
    assert balancer.get_total_inflight() == 0


def test_verls_server_still_has_what_ours_overrides() -> None:
    from sglang_multiturn.verl_plugin import server

    verls, ours = server.verls.SGLangHttpServer, server.SglangServer
    for name in ("abort_all_requests", "resume_generation", "sleep", "release_kv_cache", "launch_server"):
        assert list(inspect.signature(getattr(verls, name)).parameters) == list(
            inspect.signature(getattr(ours, name)).parameters
        )
    leading = list(inspect.signature(ours.generate).parameters)[:6]
    assert list(inspect.signature(verls.generate).parameters)[:6] == leading
    source = inspect.getsource(verls)
    assert '"rid": request_id' in source
    assert 'extra_fields = {"global_steps": self.global_steps}' in source
    assert "self.server_class = ray.remote(SGLangHttpServer)" in inspect.getsource(server.verls.SGLangReplica)


def test_sglang_still_waits_in_its_pause_before_it_counts_a_request_as_in_flight() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    generate = inspect.getsource(TokenizerManager.generate_request)
    assert generate.index("_init_req_state") < generate.index("is_pause_cond.wait_for") < generate.index("reader_lock")
    pause = inspect.getsource(TokenizerManager.pause_generation)
    assert "abort_request(abort_all=True)" in pause
    assert "model_update_lock.is_locked()" in pause
    assert {"rid", "abort_all"} <= set(inspect.signature(TokenizerManager.abort_request).parameters)


def test_sglang_still_asserts_that_it_is_idle_before_it_releases_memory() -> None:
    from sglang.srt.managers.scheduler_components import weight_updater

    assert "release_memory_occupation should be called only when server is idle" in inspect.getsource(weight_updater)


def test_tombstones_are_bounded_and_count_once() -> None:
    flights = Flights()
    for number in range(10_000):
        assert flights.abort(f"r{number}") is None
    with flights.flight("r0") as forgotten, flights.flight("r9999") as remembered:
        assert (forgotten.aborted, remembered.aborted) == (False, True)
        assert flights.abort("r0") is forgotten
    with flights.flight("r9999") as again:
        assert again.aborted is False
    assert flights.rids == []


def test_a_client_without_a_balancer_is_used_as_it_is() -> None:
    client: Any = object()
    assert RoutedClient(client)._client is client
