"""A part of torch's own tests of a backend; `make test-torch` runs them all."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or importlib.util.find_spec("expecttest") is None,
        reason="torch, or expecttest that its tests import, is not installed",
    ),
]

# One of each kind, of which `make test` draws 2. Of all that Gloo passes on 3 ranks, 91 tests,
# unisono passes every test.
TESTS = [
    "accumulate_gradients_no_sync_allreduce_with_then_hook",
    "all_gather_coalesced_with_empty",
    "all_gather_object_subgroup",
    "all_reduce_coalesced_full_group_max",
    "all_reduce_full_group_product",
    "all_reduce_sum_complex",
    "barrier_timeout_global",
    "batch_isend_irecv_gloo_tags",
    "broadcast_full_group",
    "ddp_create_graph",
    "ddp_logging_data_cpu",
    "destroy_full_group",
    "DistributedDataParallelCPU_grad_is_view",
    "gather_checks",
    "get_future",
    "isend_torch_profiler",
    "reduce_sum_twice",
    "scatter_complex",
    "scatter_object_list",
    "send_recv_any_source",
    "sparse_all_reduce_sum",
    "static_graph_api_cpu",
]


@pytest.mark.timeout(300)
def test_torchs_own_tests_pass(drawn):
    names = [f"test_{name}" for name in drawn(TESTS, 2)]
    script = Path(__file__).with_name("suite.py")
    done = subprocess.run(
        [sys.executable, str(script), "--exact", "--world-size", "3", *names],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} passed, 0 failed, 0 skipped" in done.stdout
