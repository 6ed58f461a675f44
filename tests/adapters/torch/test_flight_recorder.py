"""Files of records: torch's analyser reads them, and torch's own files are read."""

import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.support import dumps
from tests.support.calls import wait_until
from tests.support.dumps import DEFAULT, HALF
from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError
from unisono.workbench.cli.main import main
from unisono.workbench.cli.trace.gather import read_files
from unisono.workbench.trace.analysis import findings_of
from unisono.workbench.trace.decoding import decode
from unisono.workbench.trace.joined import by_rank, join

torch = pytest.importorskip("torch")
torch_dist = torch.distributed
fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
pytestmark = pytest.mark.usefixtures("forked_with_torch")


def analysed(folder):
    """Return what torch's analyser prints about a folder."""
    out = io.StringIO()
    logger, handler = logging.getLogger("Flight Recorder"), logging.StreamHandler(out)
    logger.addHandler(handler)
    with contextlib.redirect_stdout(out):
        fr_trace.main([str(folder)])
    logger.removeHandler(handler)
    return out.getvalue()


@contextlib.contextmanager
def common_folder(rank):
    """Make UNISONO_TRACE_DIR one new folder on all ranks."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    os.environ["UNISONO_TRACE_DIR"] = folder[0]
    try:
        yield Path(folder[0])
    finally:
        del os.environ["UNISONO_TRACE_DIR"]
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])


@pytest.mark.ranks(3, kind="processes")
def test_torchs_analyser_finds_the_mismatch_and_the_missing_rank(rank):
    with common_folder(rank) as folder:
        unequal, late = dist.new_group(), dist.new_group()
        x = np.zeros(4, np.float32)
        for group in (unequal, late):
            dist.all_reduce(x, group=group)
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(np.zeros(8 if rank == 2 else 4, np.float32), group=unequal)
        (folder / f"trace_rank_{rank}").unlink()
        dist.barrier()
        if rank != 2:
            with pytest.raises(CollectiveTimeoutError):
                dist.broadcast(x, 0, group=late, timeout=3)
        # Rank 2 is in no call, and learns of the failure in the background.
        assert wait_until((folder / f"trace_rank_{rank}").exists)
        dist.barrier()
        if rank == 0:
            found = analysed(folder)
            [mismatch] = [line for line in found.splitlines() if "error msg" in line]
            assert "Culprit rank 2" in mismatch
            assert "'[[4]]' does not match found input sizes: '[[8]]'" in mismatch
            # A file that was written late has the next barrier, too, which other files lack.
            assert "collective: gloo:broadcast\nmissing ranks: {2}\n" in found
            assert (
                f"test_torchs_analyser_finds_the_mismatch_and_the_missing_rank at {__file__}:"
                in found
            )


@pytest.mark.ranks(1, kind="processes")
def test_torchs_own_file_is_read(rank):
    os.environ["TORCH_FR_BUFFER_SIZE"] = "10"
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    torch_dist.all_reduce(torch.ones(3, 2, dtype=torch.float64))
    found = decode(torch._C._distributed_c10d._dump_fr_trace())
    torch_dist.destroy_process_group()
    [record] = [record for group in found.groups for record in group.records]
    assert found.rank is None
    assert (record.op, record.dtype, record.count) == ("all_reduce", "float64", 6)
    assert record.route == "gloo"


def all_retired():
    """Return whether Gloo's recorder knows that each call has ended, which it learns late."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
    return all(entry["retired"] for entry in entries)


def dump_of_gloo(folder, rank):
    """Write this rank's two files of Gloo's recorder."""
    bindings = torch._C._distributed_c10d
    for name, content in (
        ("pickle", bindings._dump_fr_trace()),
        ("json", bindings._dump_fr_trace_json()),
    ):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / f"nccl_trace_rank_{rank}").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )


@pytest.mark.ranks(3, kind="processes")
def test_dumps_of_gloo_while_ranks_are_missing(rank):
    """The calls that wait have no end, and a sub-group has no members in the files."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "10"
    with common_folder(rank) as folder:
        store = torch_dist.FileStore(str(folder / "store"), 3)
        torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        ends = torch_dist.new_group([0, 2])
        torch_dist.all_reduce(torch.ones(4))
        x, works = torch.ones(8), []
        if rank != 1:
            works.append(torch_dist.all_reduce(x, async_op=True))
        if rank == 0:
            works.append(torch_dist.all_reduce(torch.ones(5), group=ends, async_op=True))
        dump_of_gloo(folder, rank)
        dist.barrier()
        if rank == 0:
            line = test_dumps_of_gloo_while_ranks_are_missing.__code__.co_firstlineno + 11
            file = Path(__file__).name
            places = {"pickle": (f" ({file}:{line})", f" ({file}:{line + 2})")}
            for name in ("pickle", "json"):
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    assert main(["trace", str(folder / name)]) == 0
                # JSON has no frames.
                whole, sub = places.get(name, ("", ""))
                assert out.getvalue().splitlines()[:3] == [
                    "group 'default_pg': rank 1 never started all_reduce #2, in which ranks 0 and "
                    f"2 waited{whole}",
                    "group '1': all_reduce #1 did not end on rank 0, and the files do not name "
                    f"the group's members{sub}",
                    "group 'default_pg': behind #2 by 1: rank 1",
                ]
        if rank == 1:
            torch_dist.all_reduce(x)
        if rank == 2:
            torch_dist.all_reduce(torch.ones(5), group=ends)
        for work in works:
            work.wait()
        torch_dist.destroy_process_group()


@pytest.mark.ranks(2, kind="processes")
def test_dumps_of_gloo_are_replayed(rank):
    """The files have no ends, so the time between calls is compute."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    with common_folder(rank) as folder:
        store = torch_dist.FileStore(str(folder / "store"), 2)
        torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        whole = torch_dist.new_group([0, 1])
        x, parts = torch.ones(6, dtype=torch.float64), [torch.ones(2) for _ in range(2)]
        for _ in range(4):
            torch_dist.all_reduce(x)
            torch_dist.all_gather(parts, torch.ones(2), group=whole)
        torch_dist.barrier()
        assert wait_until(all_retired)
        dump_of_gloo(folder, rank)
        dist.barrier()
        for name in ("pickle", "json") if rank == 0 else ():
            out = folder / "out.json"
            words = ["replay", str(folder / name), "--net", "ethernet-25", "--hosts", "2"]
            with contextlib.redirect_stdout(io.StringIO()):
                assert main([*words, "--json", str(out)]) == 0
            recorded, predicted = json.loads(out.read_text())
            rows = [(row["op"], row["calls"], row["bytes"]) for row in predicted["groups"]]
            assert sorted(rows) == [
                ("all_gather", 4, 4 * 16),
                ("all_reduce", 4, 4 * 48),
                ("barrier", 1, 0),
            ]
            assert predicted["total_us"] > recorded["total_us"] > 0
        torch_dist.destroy_process_group()


def their_verdicts(folder):
    """Return the first wrong call of each group by torch's analyser: (number, ranks), by group."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    args, found = JobConfig().parse_args([str(folder)]), {}
    details, version = read_dir(args)
    # It takes the first file for right, and reads the files in any order.
    for call in build_db(dict(sorted(details.items())), args, version).collectives:
        ranks = call.mismatch_collectives or call.missing_ranks
        if ranks:
            found.setdefault(call.pg_desc, (call.collective_seq_id, tuple(sorted(ranks))))
    return found


def our_verdicts(files):
    ranks = by_rank(read_files(files))
    found = {}
    for finding in findings_of(ranks, join(ranks)):
        group, number = re.match(r"group '(\w+)': .*?#(\d+)", finding.text).groups()
        found[f"{DEFAULT if group == 'default_pg' else HALF}:{group}"] = int(number), finding.ranks
    return found


def random_dumps(draw):
    """Return the dumps of a world with at most one fault in each group, and never in rank 0."""
    size, counts = draw.randint(3, 6), Counter()
    ranks = {DEFAULT: range(size), HALF: range(3)}
    calls = []
    for _ in range(draw.randint(1, 12)):
        group, op = draw.choice([DEFAULT, HALF]), draw.choice(["all_reduce", "broadcast", "reduce"])
        counts[group] += 1
        calls.append((counts[group], op, group))
    faults = {}
    for group, count in counts.items():
        kind = draw.choice(["op", "sizes", "dtype", "state", "missing", "none"])
        seq = count if kind == "state" else draw.randint(1, count)
        faults[group] = (kind, seq, draw.randrange(1, len(ranks[group])))
    found = []
    for rank in range(size):
        entries = []
        for seq, op, group in calls:
            kind, at, culprit = faults[group]
            if rank not in ranks[group] or (kind == "missing" and rank == culprit and seq >= at):
                continue
            more, make = {}, dumps.entry
            if (rank, seq) == (culprit, at):
                op = "all_to_all" if kind == "op" else op
                more = {"sizes": ((8,), (8,))} if kind == "sizes" else {}
                if kind == "dtype":
                    more = {"input_dtypes": ["Int"], "output_dtypes": ["Int"]}
                make = dumps.open_entry if kind == "state" else make
            entries.append(make(len(entries), seq, op, group, **more))
        mine = {f"g{group}": members for group, members in ranks.items() if rank in members}
        found.append(dumps.dump(entries, **mine))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_verdict_is_that_of_torchs_analyser(tmp_path, seed):
    files = dumps.write(tmp_path, random_dumps(random.Random(seed)))
    assert our_verdicts(files) == their_verdicts(tmp_path)
