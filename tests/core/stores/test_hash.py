"""HashStore under many threads."""

from functools import partial

from tests.support.together import on_threads
from unisono.core.stores import HashStore

THREADS, ROUNDS = 16, 60


def test_threads_lose_nothing():
    base = HashStore()
    sums, popped, swapped = [], [], []

    def work(number):
        store = base.clone()
        for turn in range(ROUNDS):
            sums.append(store.add("n", 1))
            store.append("log", f"{number};")
            store.queue_push("jobs", f"{number}.{turn}")
            popped.append(store.queue_pop("jobs", timeout=20))
            while True:
                old = store.get("cas")
                new = b"%d" % (int(old) + 1)
                if store.compare_set("cas", old, new) == new:
                    break
            store.multi_set([f"{number}", f"last {number}"], [f"{turn}"] * 2)
            # Both or none: nobody sees the one without the other.
            if len(set(store.multi_get([f"{number}", f"last {number}"]))) != 1:
                swapped.append(number)
            store.barrier("turn", THREADS, 20)
        store.close()

    base.set("cas", "0")
    on_threads(*(partial(work, number) for number in range(THREADS)))
    total = THREADS * ROUNDS
    assert sorted(sums) == list(range(1, total + 1))
    assert sorted(popped) == sorted(
        f"{number}.{turn}".encode() for number in range(THREADS) for turn in range(ROUNDS)
    )
    log = base.get("log").decode().split(";")
    assert sorted(log[:-1]) == sorted(
        f"{number}" for number in range(THREADS) for _ in range(ROUNDS)
    )
    assert base.queue_len("jobs") == 0
    assert swapped == []
