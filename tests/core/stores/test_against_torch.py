"""Our stores give what torch's give, wherever torch's agree with each other."""

import random

import pytest

import unisono.core.stores as ours

torch_dist = pytest.importorskip("torch.distributed")

KEYS = ["a", "b", "c/d", "", "kü", "n", "\n", "k" * 8000]
VALUES = ["", "1", "-7", " 12", "x y", "ü", "\0", "long" * 1000]


@pytest.fixture(scope="module", autouse=True)
def libuv():
    """Torch's first server opens a pipe that stays as long as the process."""
    torch_dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def pair(kind, folder):
    """Return our store and torch's."""
    if kind == "file":
        return ours.FileStore(folder / "ours"), torch_dist.FileStore(str(folder / "torchs"), -1)
    if kind == "tcp":
        theirs = torch_dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return ours.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), theirs
    mine, theirs = ours.HashStore(), torch_dist.HashStore()
    if kind == "prefix":
        return ours.PrefixStore("p/q", mine), torch_dist.PrefixStore("p/q", theirs)
    return mine, theirs


def request(random_, store, kind):
    """Return a request that all of torch's stores answer alike."""
    key, value, other = random_.choice(KEYS), random_.choice(VALUES), random_.choice(VALUES)
    some = random_.sample(KEYS, random_.randrange(len(KEYS)))
    choices = [
        ("set", key, value),
        ("compare_set", key, value, other),
        ("check", some),
        ("multi_set", some, [random_.choice(VALUES) for _ in some]),
    ]
    if present := sorted(store.list_keys()):
        there = random_.choice(present)
        # torch's FileStore says True when it deletes a key that it does not have.
        choices += [("get", there), ("multi_get", [there, there]), ("delete_key", there)]
    # torch's FileStore loses the second of two equal appends.
    if not store.check([key]) or store.get(key) != value.encode():
        choices.append(("append", key, value))
    # Added to text, torch takes a leading number, drops the connection or counts from 0.
    if not store.check([key]) or store.get(key).strip().removeprefix(b"-").isdigit():
        choices += [("add", key, random_.randrange(-9, 9))] * 3
    if kind == "tcp":
        choices += [("queue_push", f"queue {key}", value)] * 2
        choices += [("queue_len", f"queue {key}"), ("list_keys",), ("num_keys",)]
        if store.queue_len(f"queue {key}"):
            choices.append(("queue_pop", f"queue {key}", False))
    return random_.choice(choices)


@pytest.mark.parametrize("kind", ["hash", "file", "prefix", "tcp"])
@pytest.mark.parametrize("seed", range(5))
def test_same_answers(kind, seed, tmp_path):
    mine, theirs = pair(kind, tmp_path)
    random_ = random.Random(seed)
    with mine:
        for _ in range(300):
            name, *args = request(random_, mine, kind)
            found, expected = (getattr(store, name)(*args) for store in (mine, theirs))
            if name == "list_keys":
                found, expected = sorted(found), sorted(expected)
            assert found == expected, (name, args)
        for key in mine.list_keys():
            assert mine.get(key) == theirs.get(key), key
