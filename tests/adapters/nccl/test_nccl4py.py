"""The names and signatures of nccl4py and cuda-core that the NCCL backend uses, without a GPU."""

import inspect

import pytest

from unisono.adapters.nccl.library import DTYPES, load

pytest.importorskip("nccl.core", reason="nccl4py is not installed")

BUFFERS = "intptr_t sendbuff, intptr_t recvbuff"
SIGNATURES = {
    "all_reduce": f"{BUFFERS}, size_t count, int datatype, int op, comm, intptr_t stream",
    "broadcast": f"{BUFFERS}, size_t count, int datatype, int root, comm, intptr_t stream",
    "reduce": f"{BUFFERS}, size_t count, int datatype, int op, int root, comm, intptr_t stream",
    "all_gather": f"{BUFFERS}, size_t sendcount, int datatype, comm, intptr_t stream",
    "reduce_scatter": f"{BUFFERS}, size_t recvcount, int datatype, int op, comm, intptr_t stream",
    "send": "intptr_t sendbuff, size_t count, int datatype, int peer, comm, intptr_t stream",
    "recv": "intptr_t recvbuff, size_t count, int datatype, int peer, comm, intptr_t stream",
}


def test_calls_have_the_arguments_that_the_kernels_pass():
    calls = load().calls
    for name, arguments in SIGNATURES.items():
        assert getattr(calls, name).__doc__.startswith(f"{name}({arguments})")
    assert calls.Comm(4660).handle == 4660
    assert calls.check_status(7) is None, "InProgress is no error"


def test_types_and_names():
    nccl, _, cuda, driver = load()
    assert {kind.name.lower() for kind in nccl.NcclDataType} == {
        name.replace("float8_e4m3fn", "float8e4m3").replace("float8_e5m2", "float8e5m2")
        for name in DTYPES
    }
    for name, number in DTYPES.items():
        if "float8" not in name:
            assert nccl.NcclDataType[name.upper()] == number
    assert [op.name for op in nccl.NcclRedOp] == ["SUM", "PROD", "MAX", "MIN", "AVG"]
    assert nccl.NCCLConfig(blocking=False, comm_name="x").blocking is False
    assert bytes(nccl.UniqueId.from_bytes(bytes(range(128)))) == bytes(range(128))
    own = "init get_async_error get_last_error create_pre_mul_sum abort finalize destroy ptr"
    assert all(hasattr(nccl.Communicator, name) for name in own.split())
    pair, reduction = ["self", "sendbuf", "recvbuf"], ["self", "sendbuf", "recvbuf", "op"]
    for name, arguments in {
        **{"allreduce": reduction, "reduce": [*reduction, "root"], "reduce_scatter": reduction},
        **{"broadcast": [*pair, "root"], "allgather": pair, "alltoall": pair},
        **{"gather": [*pair, "root"], "scatter": [*pair, "root"]},
        **{"send": ["self", "sendbuf", "peer"], "recv": ["self", "recvbuf", "peer"]},
    }.items():
        found = inspect.signature(getattr(nccl.Communicator, name)).parameters
        assert [p.name for p in found.values() if p.kind is not p.KEYWORD_ONLY] == arguments
    assert nccl.group_start.__name__ == "group_start"
    assert nccl.group_end.__name__ == "group_end"
    assert callable(nccl.get_unique_id)
    assert hasattr(nccl.CustomRedOp, "__int__")
    options = cuda.StreamOptions(nonblocking=True, priority=-1)
    assert options.priority == -1
    for name in ("from_handle", "record", "wait", "handle"):
        assert hasattr(cuda.Stream, name)
    for name in ("set_current", "create_stream", "allocate", "uuid", "compute_capability"):
        assert hasattr(cuda.Device, name)
    assert hasattr(cuda.Event, "is_done")
    assert "dstDevice, srcDevice" in driver.cuMemcpyDtoDAsync.__doc__
    assert callable(driver.cuCtxGetCurrent)
    assert callable(driver.cuCtxSetCurrent)
