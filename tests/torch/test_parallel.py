"""DDP, FSDP, DTensor and the like compute on the plug-in what they compute on Gloo, to the bit.

With two ranks there is only one order in which contributions can be added.
"""

import importlib.util

import pytest

from tests.torch.entries import run_body

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

NAMES = [
    "ddp", "ddp static graph", "ddp unused", "ddp views", "ddp no_sync", "ddp sparse", "ddp join",
    "hook all_reduce", "hook fp16", "hook fp16 wrapper", "hook post-local", "builtin all_reduce",
    "builtin fp16", "hooks by name", "powersgd", "zero", "zero in a hook",
    "zero in a hook, static graph", "fsdp1", "fsdp2", "hybrid fsdp2",
    "dtensor", "tensor parallel", "sequence parallel", "two dimensions", "pipeline",
    "pipeline 1F1B", "pipeline zero bubble", "autograd", "checkpoint", "compiled", "compiled ddp",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        path = str(tmp_path_factory.mktemp("store") / "store")
        return run_body("tests.torch.parallel_bodies", "both", 2, path, timeout=100)


def test_every_body_is_compared(results):
    assert sorted(results[0][1]) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_same_as_on_gloo(results, name):
    for rank, (gloo, ours) in enumerate(results):
        assert ours[name] == gloo[name], f"rank {rank}"
        assert any(any(numbers) for numbers in ours[name])
