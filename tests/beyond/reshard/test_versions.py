"""Files of arrays, and versions of weights, against NumPy, safetensors and hashes."""

import gc
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from contextlib import closing

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails, wait_until
from tests.support.forks import all_ended, end_all, forked
from tests.support.shardings import (
    numbered,
    part_of,
    random_layout,
    random_shape,
    random_view,
    spread,
)
from unisono.beyond.reshard import checkpoints, safetensors
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    UnsupportedError,
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def random_arrays(rank, seed, *, complete, fill):
    """Return random parts of three arrays, and a check of their values."""
    shared, own = np.random.default_rng(seed), np.random.default_rng((seed, rank))
    cuts = np.random.default_rng((seed, complete))
    size, arrays, checks = dist.get_world_size(), {}, []
    for name, dtype in zip("abc", (np.int64, np.float32, np.uint8), strict=True):
        shape = random_shape(shared)
        ranks = sorted(cuts.choice(size, int(cuts.integers(1, size + 1)), False).tolist())
        boxes = spread(random_layout(cuts, shape, ranks, complete=complete), ranks, size)[rank]
        views = [random_view(own, box, np.int64).astype(dtype, order="K") for box in boxes]
        data = numbered(shape).astype(dtype)
        for box, view in zip(boxes, views, strict=True):
            if fill:
                view[...] = part_of(data, box)
            checks.append((view, part_of(data, box)))
        arrays[name] = dist.Sharded(views, shape, starts=[box.begins for box in boxes])
    return arrays, checks


def save_random(rank, folder):
    for seed in range(10):
        arrays, _ = random_arrays(rank, seed, complete=True, fill=True)
        dist.save_arrays(arrays, folder / f"{seed}.safetensors")


def load_random(rank, folder):
    for seed in range(10):
        arrays, checks = random_arrays(rank, seed, complete=False, fill=False)
        dist.load_arrays(arrays, folder / f"{seed}.safetensors")
        for got, wanted in checks:
            np.testing.assert_array_equal(got, wanted)


def test_4_ranks_save_and_6_load(folder, world):
    world(save_random, 4, args=(folder,))
    world(load_random, 6, args=(folder,))
    load = pytest.importorskip("safetensors.numpy").load_file
    for seed in range(10):
        for name, dtype in zip("abc", (np.int64, np.float32, np.uint8), strict=True):
            array = load(folder / f"{seed}.safetensors")[name]
            np.testing.assert_array_equal(array, numbered(array.shape).astype(dtype))


@pytest.mark.ranks(2)
def test_a_file_of_safetensors_is_read(rank, folder):
    tools = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    data = torch.arange(12.0).reshape(3, 4)
    if rank == 0:
        tools.save_file({"w": data.bfloat16(), "v": data}, folder / "x.safetensors", {"k": "v"})
    dist.barrier()
    w, v = torch.zeros(3, 2), torch.zeros(3, 4, dtype=torch.bfloat16)
    halves = dist.Sharded(w, (3, 4), mesh=[0, 1], placements=[1])
    dist.load_arrays({"w": halves, "v": v}, folder / "x.safetensors")
    assert torch.equal(w, data[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(v, data.bfloat16())


@pytest.mark.ranks(2)
def test_files_in_bfloat16(rank, folder):
    x = np.array([1.0, 1.00390625, 3.14159, -2e38], np.float32)
    dist.save_arrays({"x": x, "n": np.arange(3)}, folder / "x", dtype="bfloat16")
    y, n = np.zeros(4, np.float32), np.zeros(3, int)
    dist.load_arrays({"x": y, "n": n}, folder / "x")
    np.testing.assert_array_equal(y.view(np.uint32) & 0xFFFF, 0)
    np.testing.assert_allclose(y, x, rtol=2**-8)
    assert n.tolist() == [0, 1, 2]
    if rank == 0:
        raw = (folder / "x").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert header["x"] == {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


@pytest.mark.ranks(2)
def test_wrong_arrays_of_a_file(rank, folder):
    path = folder / "x"
    with fails(CollectiveError, "failed on rank", ": no rank has [2:4] of array 'x' for the file"):
        dist.save_arrays({"x": dist.Sharded([np.zeros(2)], (4,), starts=[(0,)])}, path)
    for arrays, error, text in (
        (np.zeros(3), ArgumentTypeError, "arrays must be a dict of arrays by name, got ndarray"),
        ({}, ArgumentTypeError, "'nonsense' is no dtype of NumPy or torch"),
        (
            {"x": np.zeros(3, "S3")},
            UnsupportedError,
            "array 'x' of |S3 cannot be stored as |S3",
        ),
    ):
        dtype = "nonsense" if rank and "nonsense" in text else None
        with fails(error if rank else CollectiveMismatchError, text):
            dist.save_arrays(arrays if rank else {}, path, dtype=dtype)
    assert os.listdir(folder) == []
    dist.save_arrays({"x": np.zeros(3)}, path)
    for arrays, text in (
        ({"y": np.zeros(3)}, f"{path} has no array 'y'"),
        (
            {"x": np.zeros(4)},
            f"array 'x' is float64[3] in {path}, which does not become float64[4]",
        ),
        ({"x": np.zeros(3, int)}, "which does not become int64[3]"),
    ):
        with fails(CollectiveError, f"cannot read {path}", "rank 1", text):
            dist.load_arrays(arrays if rank else {}, path)
    with fails(CollectiveError, "No such file"):
        dist.load_arrays({}, folder / "none")
    check_usable()


BROKEN = [
    b"",
    b"\x02\0\0\0\0\0\0\0",
    b"\xff" * 8 + b"{}",
    b"\x02\0\0\0\0\0\0\0[]",
    b"\x02\0\0\0\0\0\0\0{x",
    b"\x0a\0\0\0\0\0\0\0" + b'{"x": 1}  ',
]


def header_of(entry, data=b""):
    text = json.dumps({"x": entry}).encode()
    return len(text).to_bytes(8, "little") + text + data


BROKEN += [
    header_of({"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]}),
    header_of([])[:8] + b"[" * 4,
    (100_000).to_bytes(8, "little") + b"[" * 100_000,
    header_of({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"1234567"),
    header_of({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, b"12345678"),
    header_of({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, b"12345678"),
    header_of({"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}, b"12345678"),
    header_of({"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]}, b"12345678"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_broken_files(folder, number):
    path = folder / "0000000001.safetensors"
    path.write_bytes(BROKEN[number])
    x = np.full(2, 7, np.float32)
    with pytest.raises(InvalidArgumentError) as caught:
        dist.Subscriber(folder).take({"x": x})
    assert f"{path} is no whole file of safetensors' format: " in caught.value.what
    assert x.tolist() == [7, 7]


@pytest.mark.ranks(2, kind="both")
def test_versions(rank, folder):
    publisher = dist.Publisher(folder / "new", keep=2)
    subscriber = dist.Subscriber(folder / "new")
    together = dist.Subscriber(folder / "new", group=dist.group.WORLD)
    x, y, z = np.zeros(3), np.zeros(6), np.zeros(6)
    part = dist.Sharded(x, (6,), mesh=[0, 1], placements=[0])
    assert subscriber.take({"w": y}) is None
    assert together.take({"w": z}) is None
    for number in (1, 2, 3):
        x[:] = 10 * number + rank
        assert publisher.publish({"w": part}) == number
        wanted = np.repeat([10 * number, 10 * number + 1], 3)
        # A subscriber may leave out versions.
        if number != 2:
            assert subscriber.take({"w": y}) == number
            np.testing.assert_array_equal(y, wanted)
            assert subscriber.take({"w": y}) is None
        assert together.take({"w": z}) == number
        np.testing.assert_array_equal(z, wanted)
        dist.barrier()
    names = [f"{number:010}.safetensors" for number in (2, 3)]
    assert sorted(os.listdir(folder / "new")) == names
    dist.barrier()
    with fails(CollectiveError, "it has another publisher"):
        dist.Publisher(folder / "new")
    # A restart.
    del publisher
    gc.collect()
    foreign = "checkpoint.safetensors.0123456789ab.incomplete"
    if rank == 0:
        (folder / "new" / "0000000004.safetensors.0123456789ab.incomplete").touch()
        (folder / "new" / foreign).touch()
    dist.barrier()
    again = dist.Publisher(folder / "new", keep=1)
    assert again.version == 3
    assert again.publish({"w": part}) == 4
    late = dist.Subscriber(folder / "new")
    assert late.take({"w": y}) == 4
    dist.barrier()
    assert sorted(os.listdir(folder / "new")) == ["0000000004.safetensors", foreign]
    with fails(CollectiveError, "cannot take", "has no array 'v'"):
        dist.Subscriber(folder / "new", group=dist.group.WORLD).take({"v": y})
    with fails(InvalidArgumentError, "keep=0: expected at least 1 version"):
        dist.Publisher(folder, keep=0)
    check_usable()


def alone(folder, name):
    """Return a group of one rank."""
    return dist.ProcessGroup(dist.FileStore(str(folder / name), 1), 0, 1, timeout=60)


def test_a_child_of_a_publisher_that_is_killed_keeps_no_lock(folder):
    to_child, from_child = os.pipe(), os.pipe()

    def publish():
        publisher = dist.Publisher(folder / "new", alone(folder, "first"))

        def live_on():
            os.close(to_child[1])
            os.write(from_child[1], b"x")
            os.read(to_child[0], 1)

        forked(live_on)
        signal.pause()
        publisher.publish({})

    pid = forked(publish)
    try:
        assert os.read(from_child[0], 1)  # the child lives
        with closing(alone(folder, "second")) as group:
            with fails(CollectiveError, "it has another publisher"):
                dist.Publisher(folder / "new", group)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert dist.Publisher(folder / "new", group).publish({"x": np.ones(1)}) == 1
    finally:
        os.close(to_child[1])
        for fd in (to_child[0], *from_child):
            os.close(fd)


@pytest.mark.ranks(2)
def test_ranks_that_want_other_dtypes_of_a_file(rank, folder):
    x = np.full(2, 1.5, np.float32)
    half = dist.Sharded(x, (4,), mesh=[0, 1], placements=[0])
    with fails(CollectiveMismatchError, "dtype=bfloat16", "dtype=float16"):
        dist.save_arrays({"x": half}, folder / "x", dtype="float16" if rank else "bfloat16")
    assert os.listdir(folder) == []
    text = "safetensors' format has no array of the name '__metadata__'"
    with fails(InvalidArgumentError, text):
        dist.save_arrays({"__metadata__": x}, folder / "x")
    check_usable()


@pytest.mark.ranks(1)
def test_a_version_is_never_replaced(rank, folder, monkeypatch):
    publisher, subscriber, y = dist.Publisher(folder), dist.Subscriber(folder), np.zeros(1)
    real, sync = os.fsync, []

    def fails_for_folders(fd):
        sync.append(fd)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(5, "EIO")
        return real(fd)

    monkeypatch.setattr(os, "fsync", fails_for_folders)
    with fails(CollectiveError, "cannot name"):
        publisher.publish({"w": np.ones(1)})
    assert sync
    assert publisher.version == 1
    monkeypatch.undo()
    assert subscriber.take({"w": y}) == 1
    # Another publisher on a file system without locks.
    monkeypatch.setattr("unisono.beyond.reshard.versions.lock", lambda folder: None)
    other = dist.Publisher(folder)
    assert other.publish({"w": np.full(1, 2.0)}) == 2
    assert publisher.publish({"w": np.full(1, 3.0)}) == 3
    # It comes between the number and the name.
    monkeypatch.setattr(publisher, "_newest", lambda: 2)
    publisher.version = 2
    with fails(CollectiveError, "cannot name", "File exists"):
        publisher.publish({"w": np.full(1, 4.0)})
    assert subscriber.take({"w": y}) == 3
    assert y.tolist() == [3]
    assert not [name for name in os.listdir(folder) if name.endswith("incomplete")]


@pytest.mark.ranks(2)
def test_ranks_that_have_taken_other_versions(rank, folder):
    publisher, y = dist.Publisher(folder), np.zeros(2)
    subscriber = dist.Subscriber(folder, group=dist.group.WORLD)
    publisher.publish({"w": np.ones(2)})
    assert subscriber.take({"w": y}) == 1
    if rank == 1:
        y[:], subscriber = 0, dist.Subscriber(folder, group=dist.group.WORLD)
    assert subscriber.take({"w": y}, timeout=20) == 1
    assert y.tolist() == [1, 1]
    assert subscriber.take({"w": y}, timeout=20) is None


@pytest.mark.ranks(2)
def test_an_old_version_that_cannot_be_removed(rank, folder):
    publisher = dist.Publisher(folder, keep=1)
    if rank == 0:
        (folder / "0000000000.safetensors").mkdir()
    for number in (1, 2, 3):
        assert publisher.publish({"w": np.ones(2)}, timeout=20) == number
    if rank == 0:
        assert sorted(os.listdir(folder)) == [f"{n:010}.safetensors" for n in (0, 3)]


@pytest.mark.ranks(1)
def test_a_folder_made_anew(rank, folder):
    place, y = folder / "new", np.zeros(1)
    both = [dist.Subscriber(place), dist.Subscriber(place, group=dist.group.WORLD)]
    for values in ((1, 2, 3), (99,), (98,)):
        publisher = dist.Publisher(place)
        for value in values:
            publisher.publish({"w": np.full(1, float(value))})
        for subscriber in both:
            y[:] = 0
            assert subscriber.take({"w": y}) == len(values)
            assert y.tolist() == [values[-1]]
            assert subscriber.take({"w": y}) is None
        shutil.rmtree(place)
        for subscriber in both:
            assert subscriber.take({"w": y}) is None


def test_an_unknown_dtype_beside_the_wanted_array(folder):
    entries = {
        "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "s": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [4, 8]},
    }
    text, path = json.dumps(entries).encode(), folder / "0000000001.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + np.float32([7]).tobytes() + bytes(4))
    w = np.zeros(1, np.float32)
    with fails(InvalidArgumentError, f"array 's' in {path} has the unknown dtype F8_E8M0"):
        dist.Subscriber(folder).take({"w": w, "s": np.zeros(4, np.uint8)})
    assert dist.Subscriber(folder).take({"w": w}) == 1
    assert w.tolist() == [7]


def test_a_version_that_is_always_gone(folder, monkeypatch):
    (folder / "0000000001.safetensors").touch()
    subscriber = dist.Subscriber(folder)
    monkeypatch.setattr(subscriber, "_open", lambda number, opened: False)
    with pytest.raises(CollectiveTimeoutError) as caught:
        subscriber.take({}, timeout=0.01)
    assert caught.value.what == (
        f"Subscriber.take timed out after 10 ms: each version of {folder} was removed before it "
        "could be opened"
    )


N = 50_000


def content(number):
    """Return the arrays of a version, whose hash the version itself holds."""
    data = np.random.default_rng(number).integers(0, 1 << 30, N)
    digest = np.frombuffer(hashlib.sha256(data.tobytes()).digest(), np.uint8)
    return data, digest


def is_whole(data, digest):
    return hashlib.sha256(data.tobytes()).digest() == digest.tobytes()


def publishes_until_killed(rank, folder, meeting, kill_s, victim):
    """Publish versions in a process of its own until one of the two publishing ranks is killed."""
    store = dist.FileStore(str(meeting), 2)
    group = dist.ProcessGroup(store, rank, 2, timeout=60)
    publisher = dist.Publisher(folder, group)
    group.barrier()
    if rank == victim:
        threading.Timer(kill_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            data, digest = content(publisher.version + 1)
            half = slice(rank * N // 2, (rank + 1) * N // 2)
            part = dist.Sharded(data[half], (N,), mesh=[0, 1], placements=[0])
            publisher.publish({"data": part, "digest": digest})
    except PeerLostError as error:
        if victim not in error.context.peers:
            raise
    finally:
        group.close()


def one_round(folder, seed):
    """Kill a publishing rank at a random moment; subscribers see whole versions only."""
    random = np.random.default_rng(seed)
    victim, seen = int(random.integers(2)), []
    kill_s = float(random.exponential(0.2))
    meeting = folder.with_name(f"{folder.name}-meeting-{seed}")
    args = folder, meeting, kill_s, victim
    ranks = [forked(publishes_until_killed, rank, *args) for rank in range(2)]
    data, digest = np.zeros(N, np.int64), np.zeros(32, np.uint8)
    subscriber, ended, limit_s = dist.Subscriber(folder), {}, time.monotonic() + 60
    while not all_ended(ranks, ended) and time.monotonic() < limit_s:
        if subscriber.take({"data": data, "digest": digest}) is not None:
            assert is_whole(data, digest), subscriber.version
            seen.append(subscriber.version)
    meeting.unlink(missing_ok=True)
    end_all(ranks, ended)
    # No hang: the other rank ends by itself, with an error that names the victim.
    assert [ended.get(pid) for pid in ranks] == [9 * (rank == victim) for rank in range(2)]
    assert seen == sorted(set(seen))
    # The last whole version is there for who comes late, and a new publisher goes on after it.
    late = dist.Subscriber(folder)
    taken = late.take({"data": data, "digest": digest})
    assert taken is None or is_whole(data, digest)
    assert (taken or 0) >= max(seen, default=0)
    return taken or 0


def test_a_publisher_that_dies_leaves_the_last_whole_version(folder):
    last = 0
    # The publishers of a round may die before the first version.
    for seed in range(20):
        now = one_round(folder, seed)
        assert now >= last
        last = now
        if seed >= 2 and last:
            break
    assert last > 0


@pytest.mark.whole("100 kills take a minute")
def test_100_publishers_that_die(folder):
    for seed in range(100):
        one_round(folder / str(seed % 10), 1000 + seed)


def saves_in_parts(rank, folder):
    path = folder / "model.safetensors.index.json"
    for turn in (1, 2):
        arrays, _ = random_arrays(rank, 7, complete=True, fill=True)
        dist.save_arrays(arrays, path, part_bytes=1)
        if rank == 0:
            (folder / f"names {turn}").write_text("\n".join(sorted(os.listdir(folder))))
        dist.barrier()
    wrong = [(0, path, "part_bytes=0: expected at least 1")]
    text = f"path {str(folder)!r}: the name of an index ends with .safetensors.index.json"
    for part_bytes, name, what in [*wrong, (1, str(folder), text)]:
        with fails(InvalidArgumentError, what):
            dist.save_arrays({}, name, part_bytes=part_bytes)


def loads_parts(rank, folder):
    arrays, checks = random_arrays(rank, 7, complete=False, fill=False)
    dist.load_arrays(arrays, folder / "model.safetensors.index.json")
    for got, wanted in checks:
        np.testing.assert_array_equal(got, wanted)


def test_several_files_and_an_index(folder, world):
    world(saves_in_parts, 4, args=(folder,))
    parts = [path.name for path in folder.glob("*-of-*")]
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    # The parts of the first turn are gone, and nothing incomplete is left.
    assert sorted(set(names.values())) == sorted(parts)
    assert len(parts) == 3
    assert not set(parts) & set((folder / "names 1").read_text().split())
    world(loads_parts, 6, args=(folder,))
    load = pytest.importorskip("safetensors.numpy").load_file
    for name, part in names.items():
        array = load(folder / part)[name]
        np.testing.assert_array_equal(array, numbered(array.shape).astype(array.dtype))


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"weight_map": {"x": "../x.safetensors"}}', '{"weight_map": 3}', "{}"]
)
@pytest.mark.ranks(1)
def test_broken_indices(rank, folder, text):
    path = folder / "x.safetensors.index.json"
    path.write_text(text)
    with fails(CollectiveError, f"{path} is no index of safetensors' format: "):
        dist.load_arrays({"x": np.zeros(1)}, path)
    path.unlink()
    with fails(CollectiveError, "No such file"):
        dist.load_arrays({"x": np.zeros(1)}, path)


@pytest.mark.ranks(1)
def test_parts_that_no_index_names_are_removed(rank, folder, monkeypatch):
    path, x = folder / "m.safetensors.index.json", np.zeros(1)
    dist.save_arrays({}, path, part_bytes=1)
    assert os.listdir(folder) == [path.name]

    def save(value):
        before = set(os.listdir(folder))
        dist.save_arrays({"x": np.full(1, value)}, path, part_bytes=1)
        dist.load_arrays({"x": x}, path)
        assert x.tolist() == [value]
        return set(os.listdir(folder)) - before

    (first,) = save(1.0)
    # A copy of the index needs its parts; these are no parts of this name.
    shutil.copy(path, folder / "best.safetensors.index.json")
    others = ["m-00001-of-00002.safetensors", "mm-01234567-00001-of-00001.safetensors"]
    # Of calls that were killed.
    dead = "m-01234567-00001-of-00001.safetensors"
    for name in [*others, dead, f"{dead}.0123456789ab.incomplete"]:
        (folder / name).touch()
    (second,) = save(2.0)
    stay = {path.name, "best.safetensors.index.json", first, second, *others}
    assert set(os.listdir(folder)) == stay
    dist.load_arrays({"x": x}, folder / "best.safetensors.index.json")
    assert x.tolist() == [1]

    # A call that fails at its end.
    real = os.replace

    def fails_for_indices(old, new):
        if str(new).endswith("index.json"):
            raise OSError(5, "EIO")
        real(old, new)

    monkeypatch.setattr(os, "replace", fails_for_indices)
    with fails(CollectiveError, "cannot name"):
        save(3.0)
    monkeypatch.undo()
    assert set(os.listdir(folder)) == stay
    with fails(InvalidArgumentError, f"path {str(path)!r}: an index needs part_bytes"):
        dist.save_arrays({"x": x}, str(path))
    dist.load_arrays({"x": x}, path)
    assert x.tolist() == [2]


@pytest.mark.parametrize("locks", [True, False])
def test_two_saves_of_one_index_at_once(folder, monkeypatch, locks):
    path, real, x = folder / "m.safetensors.index.json", checkpoints._write_parts, np.zeros(1)
    if not locks:

        def no_locks(file):
            raise OSError(95, "ENOTSUP")

        monkeypatch.setattr(checkpoints, "lock", no_locks)
    with closing(alone(folder, "first")) as first, closing(alone(folder, "second")) as second:

        def another_between(*words):
            monkeypatch.setattr(checkpoints, "_write_parts", real)
            text = real(*words)
            dist.save_arrays({"x": np.full(1, 2.0)}, path, second, part_bytes=1)
            dist.load_arrays({"x": x}, path, second)
            assert x.tolist() == [2]
            return text

        monkeypatch.setattr(checkpoints, "_write_parts", another_between)
        dist.save_arrays({"x": np.full(1, 1.0)}, path, first, part_bytes=1)
        dist.load_arrays({"x": x}, path, first)
    assert x.tolist() == [1]
    # The parts of the index that had the name meanwhile are gone.
    assert len(list(folder.glob("m*"))) == 2


def test_parts_of_a_save_that_was_killed(folder, monkeypatch):
    path, real = folder / "m.safetensors.index.json", checkpoints._write_parts

    def killed_between(*words):
        real(*words)
        os.kill(os.getpid(), signal.SIGKILL)

    def save(name):
        with closing(alone(folder, name)) as group:
            dist.save_arrays({"x": np.ones(3)}, path, group, part_bytes=1)

    monkeypatch.setattr(checkpoints, "_write_parts", killed_between)
    assert os.waitpid(forked(save, "first"), 0)[1] == signal.SIGKILL
    assert len(list(folder.glob("m*"))) == 2
    assert not path.exists()
    monkeypatch.undo()
    save("second")
    # One part, and the index.
    assert len(list(folder.glob("m*"))) == 2
    assert path.exists()


@pytest.mark.parametrize("part_bytes", [None, 1])
@pytest.mark.ranks(2, kind="processes")
def test_a_file_that_is_replaced_between_the_ranks(rank, folder, monkeypatch, part_bytes):
    name = "m.safetensors.index.json" if part_bytes else "m.safetensors"
    (folder / "new").mkdir(exist_ok=True)
    for place, value in ((folder, 1.0), (folder / "new", 2.0)):
        dist.save_arrays({"x": np.full(1, value)}, place / name, part_bytes=part_bytes)
    # Rank 0 opens the first version, rank 1 the second one; or the index of the first one.
    module, function = (safetensors, "names_in") if part_bytes else (checkpoints, "opened")
    real, calls, flag = getattr(module, function), [], folder / "opened"

    def replaced_between(path):
        calls.append(path)
        if len(calls) == 1 and rank == 1 and not part_bytes:
            wait_until(flag.exists, 20)
            os.replace(folder / "new" / name, folder / name)
        result = real(path)
        if len(calls) == 1 and rank == 1 and part_bytes:
            old = list(folder.glob("m-*"))
            for new in sorted((folder / "new").iterdir()):  # the index comes last
                os.replace(new, folder / new.name)
            for part in old:
                part.unlink()
        flag.touch()
        return result

    monkeypatch.setattr(module, function, replaced_between)
    x = np.zeros(1)
    dist.load_arrays({"x": x}, folder / name)
    assert x.tolist() == [2]
    monkeypatch.undo()


@pytest.mark.ranks(2, kind="processes")
def test_ranks_that_see_different_files(rank, folder, monkeypatch):
    (folder / str(rank)).mkdir()
    monkeypatch.chdir(folder / str(rank))
    group = dist.new_group([rank], use_local_synchronization=True)
    dist.save_arrays({"x": np.full(1, float(rank))}, "x", group)
    monkeypatch.setattr(checkpoints, "_SETTLE_S", 0.1)
    with fails(CollectiveMismatchError, ": the ranks see different files of the name x"):
        dist.load_arrays({"x": np.zeros(1)}, "x")
    check_usable()
