"""Dumps in the format of torch's NCCL flight recorder, as ProcessGroupNCCL writes them."""

import json
import pickle

DEFAULT = "0"
HALF = "1"


def entry(number, seq, op, group, sizes=((4,), (4,)), **more):
    """Return an entry; its calls take 1 us, 1 ms after the one before."""
    begin_ns = 1_700_000_000_000_000_000 + number * 1_000_000
    return {
        "frames": [{"name": "step", "filename": "train.py", "line": 10 + seq}],
        "record_id": number,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == DEFAULT else "half"],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": begin_ns,
        "input_sizes": [list(sizes[0])],
        "input_dtypes": ["Float"],
        "output_sizes": [list(sizes[1])],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": begin_ns,
        "time_discovered_completed_ns": begin_ns + 1000,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }


def open_entry(number, seq, op, group, **more):
    """Return the entry of a call that has not ended."""
    is_open = {"state": "started", "retired": False, "time_discovered_completed_ns": None}
    return entry(number, seq, op, group, **is_open | more)


def gloo_entry(number, seq, op, group, file="train.py", *, as_json=False, **more):
    """Return an entry of Gloo, which writes no times but that of the call, and no state."""
    not_yet = 0 if as_json else None
    frames = [
        ("/venv/site-packages/torch/distributed/distributed_c10d.py", 3245),
        ("/venv/site-packages/torch/distributed/c10d_logger.py", 83),
        ("/home/me/torch/" + file, 10 + seq),
        ("/home/me/torch/main.py", 5),
    ]
    at = [{"name": "f", "filename": file, "line": line} for file, line in frames]
    return {
        **entry(number, seq, op, group),
        "frames": [] if as_json else at,
        "process_group": [group, "default_pg" if group == DEFAULT else "undefined"],
        "profiling_name": f"gloo:{op}",
        "state": "scheduled",
        "time_discovered_started_ns": not_yet,
        "time_discovered_completed_ns": not_yet,
        **more,
    }


def gloo_dump(entries, ranks):
    """Return the dump of a rank of Gloo; `ranks`: of the default group, or () where it has none."""
    config = {"": {"name": "", "desc": "", "ranks": str(list(ranks))}}
    return {"version": "2.10", "pg_config": config, "entries": entries, "comm_lib_version": ""}


def dump(entries, **groups):
    """Return the dump of a rank; `groups`: the ranks of each group, by its number after "g"."""
    config = {
        name[1:]: {
            "name": name[1:],
            "desc": "default_pg" if name[1:] == DEFAULT else "half",
            "ranks": str(list(ranks)),
        }
        for name, ranks in groups.items()
    }
    return {"version": "2.10", "pg_config": config, "entries": entries, "nccl_comm_state": {}}


def write(folder, dumps, *, as_json=False):
    """Write the dump of each rank; return the files."""
    files = []
    for rank, each in enumerate(dumps):
        files.append(folder / f"nccl_trace_rank_{rank}")
        content = json.dumps(each).encode() if as_json else pickle.dumps(each, protocol=2)
        files[-1].write_bytes(content)
    return [str(file) for file in files]
