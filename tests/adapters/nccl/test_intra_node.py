"""IntraNodeComm over the fake GPU: the text of its kernels runs on the CPU, with threads."""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from importlib.resources import files
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import unisono as dist
from tests.adapters.nccl import fake_cuda, test_nccl
from tests.adapters.nccl.test_nccl import LIMIT_S
from tests.support.oracle import check, reduction, values
from tests.support.together import on_threads
from unisono.adapters.nccl import intra_node
from unisono.adapters.nccl.intra_node import (
    DTYPES,
    ONE_SHOT_BYTES,
    TWO_SHOT_BYTES,
    VARIABLE,
    _call_type,
    algorithm_of,
    blocks_of,
    most_blocks_of,
    places_of,
)
from unisono.adapters.nccl.nvrtc import SOURCE, compiled
from unisono.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    UnisonoError,
    UnsupportedError,
)
from unisono.testing import run

TEXT = files("unisono.adapters.nccl").joinpath(SOURCE).read_text(encoding="utf-8")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

# Links of a DGX-1: two quads, and each rank to its counterpart.
CUBE = [sum(1 << b for b in range(8) if b != a and (b // 4 == a // 4 or b == a ^ 4))
        for a in range(8)]  # fmt: skip


def kernels_of(size):
    """Return the kernels for the CPU, compiled once."""
    return fake_cuda.compiled_on_cpu(TEXT.encode(), (f"-DRANKS={size}",))


def on_gpus(size, body):
    kernels_of(size)  # now, because a busy machine may take longer for it than a call may take
    return test_nccl.on_gpus(size, body)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    with fake_cuda.installed():
        yield


@pytest.fixture
def launched(monkeypatch):
    """Return the kernels that were launched."""
    made = []

    def record(self, algorithm, *how, original=intra_node.IntraNodeComm.all_reduce):
        made.append(algorithm)
        return original(self, algorithm, *how)

    monkeypatch.setattr(intra_node.IntraNodeComm, "all_reduce", record)
    return made


def unlink():
    for a in range(8):
        for b in range(8):
            fake_cuda.links[a, b] = bool(CUBE[a] >> b & 1)


# ---- without a GPU ------------------------------------------------------------------------------


def test_the_choice_by_size():
    kib, mib = 1 << 10, 1 << 20
    sizes = (8, 256 * kib, 256 * kib + 4, 10 * mib, 10 * mib + 4)
    chosen = ["one_shot", "one_shot", "two_shot", "two_shot", None]
    assert [algorithm_of(n, is_cube=False) for n in sizes] == chosen
    chosen = ["cube_mesh", "cube_mesh", None, None, None]
    assert [algorithm_of(n, is_cube=True) for n in sizes] == chosen
    assert (256 * kib, 10 * mib) == (ONE_SHOT_BYTES, TWO_SHOT_BYTES)
    assert [blocks_of(n, "one_shot", 4) for n in (1, 8192, 8208, 1 << 20)] == [1, 1, 2, 24]
    assert blocks_of(4 * 8208, "two_shot", 4) == 2
    assert [blocks_of(1 << 20, "one_shot", 2, most) for most in (0, 1, 7)] == [1, 1, 7]


@pytest.mark.parametrize(
    ("gpus", "most"),
    [
        ([("a", 132), ("b", 132)], 24), ([("a", 132)] * 8, 16), ([("a", 10)] * 3, 3),
        ([("a", 132), ("b", 10), ("b", 10), ("c", 20)], 5), ([("a", 4)] * 8, 0),
    ],
)  # fmt: skip
def test_ranks_that_share_a_gpu_have_room_for_all_blocks(gpus, most):
    assert most_blocks_of(gpus) == most


def test_places_in_a_cube_mesh():
    places = places_of(CUBE)
    assert [place.relay for place in places] == [rank ^ 4 for rank in range(8)]
    assert [place.quad for place in places] == [0x0F] * 4 + [0xF0] * 4
    order = [3, 6, 0, 5, 7, 1, 2, 4]  # other numbers for the same GPUs
    links = [sum(1 << order.index(b) for b in range(8) if CUBE[a] >> b & 1) for a in order]
    for rank, place in enumerate(places_of(links)):
        assert order[place.relay] == order[rank] ^ 4
        quad = {order[peer] for peer in range(8) if place.quad >> peer & 1}
        assert quad == {each for each in range(8) if each // 4 == order[rank] // 4}
    ring = [1 << (rank + 1) % 8 | 1 << (rank - 1) % 8 for rank in range(8)]
    full = [0xFF & ~(1 << rank) for rank in range(8)]
    assert [places_of(each) for each in (ring, full, [2, 1])] == [None] * 3
    crossed = [each ^ (0x20 if at == 0 else 0) for at, each in enumerate(CUBE)]
    assert places_of(crossed) is None


def test_nvrtc_compiles_every_kernel(monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        codes = [compiled(capability, 2) for capability in ((8, 0), (9, 0))]
        codes += [compiled((9, 0), ranks) for ranks in (3, 8)]
    except UnisonoError as error:
        pytest.skip(error.what)
    for code in codes:
        assert code.startswith(b"\x7fELF")
        for algorithm in ("one_shot", "two_shot", "cube_mesh"):
            for dtype in DTYPES:
                assert f".text.{algorithm}_{dtype}".encode() in code
    monkeypatch.setattr("unisono.adapters.nccl.nvrtc.SOURCE", "nvrtc.py")
    with pytest.raises(UnsupportedError, match="error"):
        compiled((9, 0), 4)


def test_nvrtc_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(UnsupportedError) as caught:
        compiled((9, 0), 2)
    assert caught.value.what.startswith("IntraNodeComm needs NVRTC: ")
    assert caught.value.hint.startswith("pip install nvidia-cuda-nvrtc, or ")


# What a program with ThreadSanitizer must find: text of the kernels -> other text.
PLANTED = {
    "nothing": (2, "", ""),
    "nothing with three": (3, "", ""),
    "nothing in a cube mesh": (8, "", ""),
    "no barrier before the flag": (2, "  __syncthreads();\n  unsigned peer", "  unsigned peer"),
    "no second meeting": (2, "if (!meet(call, EVERYONE, call.meeting + 1)) return;", ""),
    "no last meeting": (2, "  meet(call, EVERYONE, call.meeting + 1);", ""),
    "no third meeting": (2, "  meet(call, EVERYONE, call.meeting + 2);", ""),
    "no last meeting of relays": (8, "call.quad | 1u << call.relay", "call.quad"),
    "no meeting of relays": (8, "if (!meet(call, 1u << call.relay, call.meeting + 1)) return;", ""),
    "no meeting of the quad": (8, "if (!meet(call, call.quad, call.meeting)) return;", ""),
    "partial results in the slot": (8, "packs_at(call, call.rank, PARTIAL)[i] = sum_of",
                                    "packs_at(call, call.rank, SLOT)[i] = sum_of"),
    "blocks that read other packs": (3, "Index begin = call.rank * part;",
                                     "Index begin = call.rank * part; part += call.rank;"),
    "relaxed": (2, "", ""),
}  # fmt: skip


@needs_compiler
@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", PLANTED)
def test_races_of_the_kernels_are_found(name, tmp_path):
    """Calls follow one another without a pause, on blocks of which the number changes."""
    ranks, text, other = PLANTED[name]
    assert text in TEXT
    (tmp_path / SOURCE).write_text(TEXT.replace(text, other, 1) if text else TEXT)
    program, source = tmp_path / "kernels", Path(__file__).with_name("kernels_on_cpu.cpp")
    flags = ["-std=c++20", "-g", "-O1", "-fsanitize=thread", "-Wno-unknown-pragmas", "-DMAIN"]
    flags += ["-DRELAXED"] if name == "relaxed" else []
    subprocess.run(
        ["g++", *flags, f"-DRANKS={ranks}", f"-I{tmp_path}", source, "-o", program, "-pthread"],
        check=True,
    )
    env = os.environ | {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    ended = subprocess.run([program], env=env, capture_output=True, text=True)
    found = ended.returncode != 0
    assert found != name.startswith("nothing"), ended.stdout + ended.stderr


@needs_compiler
@pytest.mark.parametrize(
    ("algorithm", "size"), [("one_shot", 3), ("two_shot", 3), ("cube_mesh", 8)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_the_cpu_engine(algorithm, size, dtype):
    counts = (1, 8, 333)
    cpu = run(cpu_sums, size, args=(algorithm, dtype, counts), ranks="threads")
    library = kernels_of(size)
    assert library.call_bytes() == ctypes.sizeof(_call_type(size))
    memory = [np.zeros(1 << 19, np.uint8) for _ in range(size)]
    places = places_of(CUBE) if algorithm == "cube_mesh" else [(0, 0)] * size
    made = [[values(dtype, rank, count).copy() for rank in range(size)] for count in counts]

    def kernels(rank):
        for call, arrays in enumerate(made, 1):
            address = arrays[rank].ctypes.data
            structure = _call_type(size)(
                tuple(each.ctypes.data for each in memory), address, address,
                stop.ctypes.data, arrays[rank].nbytes, 3 * call, rank,
                *places[rank],
            )  # fmt: skip
            kernel = getattr(library, f"{algorithm}_{dtype}")
            library.launch(kernel, ctypes.byref(structure), 2, 8)

    stop = np.zeros(1, np.uint32)
    on_threads(*(partial(kernels, rank) for rank in range(size)))
    for call, arrays in enumerate(made):
        for rank in range(size):
            mine, theirs = (as_bits(x, dtype) for x in (arrays[rank], cpu[rank][call]))
            assert np.array_equal(mine, theirs), (counts[call], rank)


@needs_compiler
@pytest.mark.parametrize("calls", [1, 2**30, 2**31 + 2**30, 2**40])
def test_a_flag_of_long_ago_ends_no_wait(calls):
    """A block that no call has used for billions of calls; the host has stopped the kernel."""
    library, x, stop = kernels_of(2), np.ones(4, np.float32), np.ones(1, np.uint32)
    memory = [np.zeros(1 << 19, np.uint8) for _ in range(2)]
    for each in memory:
        each[:4096].view(np.uint64)[:] = 3
        each[4096:].view(np.float32)[:] = 5
    structure = _call_type(2)(
        tuple(each.ctypes.data for each in memory), x.ctypes.data, x.ctypes.data,
        stop.ctypes.data, x.nbytes, 3 + 3 * calls, 0, 0, 0,
    )  # fmt: skip
    library.launch(library.one_shot_float32, ctypes.byref(structure), 1, 2)
    assert x.tolist() == [1] * 4  # without a sum


def cpu_sums(rank, algorithm, dtype, counts):
    results = []
    for count in counts:
        x = values(dtype, rank, count).copy()
        dist.all_reduce(x, algorithm={"two_shot": "rank_order"}.get(algorithm, algorithm))
        results.append(x)
    return results


def as_bits(x, dtype):
    """Return the bits, with one NaN for all: which NaN a processor makes is its own choice."""
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    x = x.view(kind)
    return np.where(np.isnan(x), 1, x.view(f"u{kind.itemsize}"))


# ---- over the fake GPU --------------------------------------------------------------------------


def sums(dtype, counts, size):
    def body(rank):
        for count in counts:
            x = fake_cuda.array(values(dtype, rank, count))
            dist.all_reduce(x)
            got = x.get()
            # In the order of ranks, rounded at the end: the bits of the CPU's one_shot.
            kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            parts = [values(dtype, other, count).view(kind) for other in range(size)]
            with np.errstate(all="ignore"):
                total = sum(part.astype(np.float32) for part in parts).astype(kind)
            expected, slack = reduction(dtype, "SUM", size, count)
            check((dtype, count), got, expected, slack)
            same = (got.view(kind) == total) | (np.isnan(got.view(kind)) & np.isnan(total))
            assert same.all(), (dtype, count)

    return body


@needs_compiler
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_have_the_bits_of_the_order_of_ranks(gpu, launched, dtype, size):
    counts = (1, 7, 64, 1001, 1, 140_001)
    on_gpus(size, sums(dtype, counts, size))
    assert set(launched) == {"one_shot", "two_shot"}


@needs_compiler
def test_ranks_that_share_a_small_gpu_launch_fewer_blocks(gpu, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(fake_cuda.Device.properties, "multiprocessor_count", 7)
    fake_cuda.uuids.update({1: "GPU-0"})

    def body(rank):
        x = fake_cuda.array(np.full(50_000, rank + 1.0, np.float32))
        dist.all_reduce(x)
        assert (x.get() == 6).all()

    on_gpus(3, body)
    assert fake_cuda.grids == [3] * 3


@needs_compiler
def test_a_hybrid_cube_mesh(gpu, launched):
    unlink()

    def body(rank):
        for count in (1, 301, 70_000):
            x = fake_cuda.array(np.full(count, rank + 0.5, np.float32))
            dist.all_reduce(x)
            assert (x.get() == 32).all(), count
        assert "intra_node=yes" in repr(dist.group.WORLD)

    on_gpus(8, body)
    assert launched == ["cube_mesh"] * 16


@needs_compiler
def test_what_nccl_serves(gpu, launched):
    def body(rank):
        x = fake_cuda.array(np.full(5, rank + 1.0))
        for call in (
            lambda: dist.all_reduce(x),
            lambda: dist.all_reduce(fake_cuda.array([1.0], np.float32), dist.ReduceOp.MAX),
            lambda: dist.all_reduce(fake_cuda.array([1.0], np.float32), dist.ReduceOp.AVG),
            lambda: dist.all_reduce(fake_cuda.array([], np.float32)),
            lambda: dist.all_reduce(fake_cuda.array(np.ones(TWO_SHOT_BYTES // 4 + 1, "f4"))),
        ):
            call()
        assert x.get().tolist() == [3] * 5

    on_gpus(2, body)
    assert launched == ["one_shot"] * 2  # the empty ones


@needs_compiler
def test_arrays_at_any_address_and_many_calls(gpu):
    def body(rank):
        for at in (1, 2, 3):
            host = np.zeros(100, np.float32)
            x = fake_cuda.Array(host[at : at + 50 + at], rank)
            x[:] = np.arange(50 + at, dtype=np.float32) * (rank + 1)
            for _ in range(3):
                dist.all_reduce(x)
            assert np.array_equal(x.get(), np.arange(50 + at) * 3 * 4)
            assert host[:at].sum() + host[50 + 2 * at :].sum() == 0

    on_gpus(2, body)


@needs_compiler
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (lambda: fake_cuda.refused.update(cuIpcOpenMemHandle=[1]), "rank 1: CUDA refused to map"),
        (lambda: fake_cuda.refused.update(cuMemAlloc=[0, 2]), "rank 0: CUDA refused to get memory"),
        (lambda: fake_cuda.refused.update(cuModuleGetFunction=[2]), "rank 2: CUDA refused to find"),
        (lambda: fake_cuda.refused.update(cuDeviceGetP2PAttribute=[1]), "rank 1: CUDA refused to"),
        (lambda: fake_cuda.links.update({(0, 2): False, (2, 0): False}),
         "ranks 0 and 2 have no NVLink to each other rank, and there is no cube mesh"),
    ],
)  # fmt: skip
def test_without_it_nccl_serves_all_and_the_group_says_why(gpu, launched, plan, why):
    plan()

    def body(rank):
        x = fake_cuda.array([1.0], np.float32)
        dist.all_reduce(x)
        assert x.get().tolist() == [3]
        assert f"intra_node=no ({why}" in repr(dist.group.WORLD)

    on_gpus(3, body)
    assert not launched


def test_without_nvrtc_nccl_serves_all_and_the_group_says_what_to_install(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)

    def body(rank):
        x = fake_cuda.array([1.0], np.float32)
        dist.all_reduce(x)
        assert x.get().tolist() == [2]
        assert "intra_node=no (rank 0: IntraNodeComm needs NVRTC: " in repr(dist.group.WORLD)
        assert "; pip install nvidia-cuda-nvrtc, or " in repr(dist.group.WORLD)

    test_nccl.on_gpus(2, body)


@needs_compiler
def test_an_error_of_a_library_on_one_rank_is_named_on_all(gpu, launched, monkeypatch):
    def handle(self, original=intra_node.IntraNodeComm.handle):
        if fake_cuda.current_device() == 1:
            raise ValueError("an odd\n\0 answer \U0001f600" + 300 * "\U0001f600")
        return original(self)

    monkeypatch.setattr(intra_node.IntraNodeComm, "handle", handle)

    def body(rank):
        x = fake_cuda.array([1.0], np.float32)
        dist.all_reduce(x)
        assert x.get().tolist() == [2]
        assert "intra_node=no (rank 1: ValueError: an odd answer " in repr(dist.group.WORLD)

    on_gpus(2, body)
    assert not launched


@needs_compiler
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (lambda: fake_cuda.refused.update(cuIpcOpenMemHandle=[2]),
         "rank 2: CUDA refused to map the memory of rank 1: 801"),
        (lambda: fake_cuda.links.update({(1, 2): False, (2, 1): False}),
         "ranks 1 and 2 have no NVLink to each other rank, and there is no cube mesh"),
    ],
)  # fmt: skip
def test_ranks_of_a_sub_group_are_named_as_in_the_world(gpu, plan, why):
    plan()

    def body(rank):
        pair = dist.new_group([1, 2])
        if rank:
            x = fake_cuda.array([1.0], np.float32)
            pair.all_reduce(x)
            assert x.get().tolist() == [2]
            assert f"intra_node=no ({why})" in repr(pair)

    on_gpus(3, body)


@needs_compiler
def test_kernels_are_loaded_before_the_first_call(gpu, launched):
    """CUDA may wait for the kernels of the process to load another."""
    have_met = threading.Barrier(2)

    def body(rank):
        dist.all_reduce(fake_cuda.array([1.0], np.float32))
        have_met.wait(LIMIT_S)
        fake_cuda.refused.update(cuModuleGetFunction=[0, 1])
        x = fake_cuda.array([1.0], np.float16)
        dist.all_reduce(x)
        assert x.get().tolist() == [2]

    on_gpus(2, body)
    assert launched == ["one_shot"] * 4


@needs_compiler
def test_no_file_of_the_kernels_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library = fake_cuda.compiled_on_cpu(TEXT.encode(), ("-DRANKS=2", "-DANOTHER"))
    assert library.call_bytes() == ctypes.sizeof(_call_type(2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("word", "wanted"), [("1", True), ("True", True), ("0", False)])
def test_the_words_of_torch(monkeypatch, word, wanted):
    monkeypatch.setenv(VARIABLE, word)
    assert intra_node.is_wanted() == wanted


@needs_compiler
def test_a_rank_that_does_not_want_it(gpu, launched, monkeypatch):
    monkeypatch.setattr(intra_node, "is_wanted", lambda: fake_cuda.current_device() == 0)

    def body(rank):
        x = fake_cuda.array([1.0], np.float32)
        dist.all_reduce(x)
        assert x.get().tolist() == [2]
        return dist.group.WORLD.backends["cuda"]._kernels.link.no_intra_node

    assert on_gpus(2, body) == [f"{VARIABLE} is not 1 on rank 1"] * 2
    assert not launched


# ---- ranks that are late, wrong or stopped -----------------------------------------------------


@needs_compiler
def test_a_late_rank_is_named_and_the_kernels_of_the_others_end(gpu, launched):
    late = threading.Barrier(3)

    def body(rank):
        x = fake_cuda.array([1.0], np.float32)
        dist.all_reduce(x)
        if rank == 2:
            late.wait(LIMIT_S)
            return ""
        work = dist.all_reduce(x, async_op=True, timeout=0.5)
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait(LIMIT_S)
        x.get()  # the stream waits for the kernel
        late.wait(LIMIT_S)
        return caught.value.what

    for what in on_gpus(3, body)[:2]:
        assert "rank 2 never entered it" in what
    assert len(launched) == 5


@needs_compiler
def test_an_abort_ends_the_kernels_of_all_ranks(gpu):
    have_met = threading.Barrier(3)

    def body(rank):
        x = fake_cuda.array([1.0], np.float32)
        dist.all_reduce(x)
        have_met.wait(LIMIT_S)
        if rank == 0:
            dist.group.WORLD.abort("enough")
            return "enough"
        with pytest.raises(CollectiveAbortedError) as caught:
            dist.all_reduce(x, async_op=True).wait(LIMIT_S)
        x.get()
        return caught.value.what

    for what in on_gpus(3, body):
        assert "enough" in what


@needs_compiler
def test_calls_that_differ_are_named(gpu):
    def body(rank):
        x = fake_cuda.array([1.0], np.float32)
        dist.all_reduce(x)
        x.get()  # or the error may be that of this call: the group broke before it ended
        x = fake_cuda.array(np.ones(3 + rank % 2, np.float32))
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.all_reduce(x, async_op=True).wait(LIMIT_S)
        x.get()
        return caught.value.what

    for what in on_gpus(3, body):
        assert "all_reduce(float32[4], SUM)" in what


@needs_compiler
def test_a_kernel_that_does_not_end_is_stopped_at_the_deadline(gpu):
    gate, raised = threading.Event(), threading.Barrier(2)

    def body(rank):
        x = fake_cuda.array([1.0], np.float32)
        dist.all_reduce(x)
        if rank == 1:
            fake_cuda.Stream(0).put(gate.wait, LIMIT_S)
        work = dist.all_reduce(x, async_op=True, timeout=0.5)
        with pytest.raises(UnisonoError) as caught:
            work.wait(LIMIT_S)
        raised.wait(LIMIT_S)
        gate.set()
        return caught.value.what

    texts = on_gpus(2, body)
    assert any("every rank entered it, but the data did not arrive" in text for text in texts)
