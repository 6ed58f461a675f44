"""Every operation and dtype against Gloo, in real processes."""

import importlib.util

import pytest

from tests.torch.entries import run_body

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

RANKS = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        path = str(tmp_path_factory.mktemp("store") / "store")
        return run_body("tests.torch.operation_bodies", "both", RANKS, path)


@pytest.mark.parametrize("part", [0, 1], ids=["dtypes", "calls"])
def test_what_gloo_computes_the_plugin_computes(results, part):
    for rank, (gloo, ours) in enumerate(results):
        assert gloo[part].keys() == ours[part].keys()
        for name, expected in gloo[part].items():
            if expected != "refused":
                assert ours[part][name] == expected, f"rank {rank}: {name}"


def test_what_gloo_refuses_is_right_too(results):
    # The same numbers in a type that Gloo takes; AVG, which it lacks, from the sum.
    compared = set()
    for gloo, ours in results:
        for name, got in ours[0].items():
            if gloo[0][name] != "refused" or got == "refused":
                continue
            dtype, op = name.split()[1], name.partition(" ")[2].partition(" ")[2]
            known = "torch.float32" if "reduce_scatter" in name else "torch.int32"
            expected = gloo[0][name.replace(dtype, known).replace("AVG", "SUM")]
            for (_, mine), (_, theirs) in zip(got, expected, strict=True):
                if op == "AVG":
                    whole = "int" in dtype
                    theirs = [n // RANKS if whole else n / RANKS for n in theirs]
                assert [complex(n) for n in mine] == pytest.approx(theirs, rel=0.01), name
            compared.add((dtype, op))
    assert {("torch.int16", "SUM"), ("torch.uint64", "BXOR"), ("torch.int16", "AVG")} <= compared


def test_what_the_plugin_refuses_it_refuses_on_all_ranks(results):
    refused = [
        {name for name, value in ours[0].items() if value == "refused"} for _, ours in results
    ]
    assert refused[0] == refused[1] == refused[2]
    assert {name for name in refused[0] if "AVG" in name} == {
        "all_reduce torch.bool AVG",
        "all_reduce torch.float8_e4m3fn AVG",
        "all_reduce torch.float8_e5m2 AVG",
    }


def test_sub_groups(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = str(tmp_path / "store")
    results = run_body("tests.torch.operation_bodies", "in_groups", RANKS, path)
    first, _, last = results
    assert first["some"] == [4.0, 0, 2]
    assert last["some"] == [4.0, 1, 2]
    assert first["source"] == [2, 7.0]
    for rank, found in enumerate(results):
        assert found["made again"] == [3.0, 3.0, 3.0]
        assert found["gloo beside it"] == [3.0, "gloo"]
        assert found["split"] == ([1.0, 1 - rank, 2] if rank < 2 else None)
