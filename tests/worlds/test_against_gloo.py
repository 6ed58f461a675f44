"""The same script under torch.distributed with Gloo and under unisono, in real processes."""

import pytest

from tests.worlds import gloo_bodies
from unisono.testing import run


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_results_are_those_of_gloo(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    theirs = run(gloo_bodies.with_gloo, 3, ranks="processes", args=(str(tmp_path / "store"),))
    ours = run(gloo_bodies.with_unisono, 3, ranks="processes")
    for rank in range(3):
        assert ours[rank].keys() == theirs[rank].keys()
        assert len(ours[rank]) > 40
        for name, expected in theirs[rank].items():
            assert ours[rank][name] == expected, f"rank {rank}: {name}"
