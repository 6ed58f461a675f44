"""`unisono run --stats` prints what the calls of all workers have cost."""

import re

SCRIPT = """\
import time
import numpy as np
import unisono as dist

dist.init_process_group()
for _ in range(5):
    dist.all_reduce(np.zeros(250_000, np.float32))
store = dist.group.WORLD.store
if dist.get_rank() == 0:
    work = dist.barrier(async_op=True)
    while dist.trace_records()[-1].waited_for is None:
        time.sleep(0.01)
    store.set("waits", "1")
    work.wait()
else:
    store.wait(["waits"])
    time.sleep(0.2)
    dist.barrier()
dist.destroy_process_group()
"""


def test_the_table_shows_calls_bytes_and_the_straggler(launches):
    code, _, err = launches.run("--nproc-per-node", 2, "--stats", script=SCRIPT)
    assert code == 0
    table = err[err.index("unisono run: calls in group 'default' on 2 ranks") :].splitlines()
    rows = {words[0]: words for words in map(str.split, table[2:])}
    assert rows["all_reduce"][1:3] == ["5", "10.000"]
    assert rows["barrier"][1] == "1"
    assert float(rows["barrier"][4]) > 150
    assert rows["barrier"][5] == "0"
    slowest = re.findall(r"rank +(\d+) +([\d.]+) s", "\n".join(table))
    assert float(dict(slowest)["1"]) > 0.15


def test_without_calls(launches):
    code, _, err = launches.run("--nproc-per-node", 1, "--stats", script="pass")
    assert (code, err) == (0, "unisono run: no worker has recorded a call\n")
