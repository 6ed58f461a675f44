"""The flags about nodes, rendezvous and restarts, and what they become."""

import argparse
import os

import pytest

from unisono.core.platform.processes import IS_LINUX
from unisono.core.rendezvous.agents.member import Timing
from unisono.core.rendezvous.agents.state import JobLimits
from unisono.errors import InvalidArgumentError
from unisono.launcher.spec import NodeMeeting
from unisono.workbench.cli.nodes import add_node_flags, node_options, unknown_conf, workers_per_node

pytestmark = pytest.mark.usefixtures("clean_environment")


def options_of(*arguments):
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_node_flags(parser)
    return parser.parse_args(arguments)


def parse(*arguments):
    return node_options(options_of(*arguments))


def test_defaults_are_one_node_without_restarts():
    assert parse() == {
        "limits": JobLimits(min_nodes=1, max_nodes=1, max_restarts=0),
        "meeting": NodeMeeting(),
        "run_id": None,
        "role": "default",
        "master_port": 0,
    }


@pytest.mark.parametrize(("text", "low", "high"), [("1", 1, 1), ("3", 3, 3), ("2:5", 2, 5)])
def test_number_of_nodes(text, low, high):
    options = parse(f"--nnodes={text}", "--rdzv-backend=c10d", "--rdzv-endpoint=a")
    assert options["limits"] == JobLimits(min_nodes=low, max_nodes=high, max_restarts=0)


@pytest.mark.parametrize("text", ["0", "2:1", "1:2:3", "x", "", "1:", "-1"])
def test_no_number_of_nodes(text):
    with pytest.raises(argparse.ArgumentError, match="--nnodes"):
        parse(f"--nnodes={text}")


def test_static():
    meeting = parse("--nnodes=2", "--node-rank=1", "--master-addr=a", "--master_port=7")["meeting"]
    expected = (("a", 7), False, 1, True)
    got = (meeting.endpoint, meeting.hosting, meeting.node_rank, meeting.share_port)
    assert got == expected
    assert parse("--nnodes=2")["meeting"].endpoint == ("127.0.0.1", 29500)
    assert parse("--nnodes=2")["meeting"].hosting is True
    assert parse("--nnodes=2", "--rdzv-conf=rank=1")["meeting"].node_rank == 1


def test_c10d():
    flags = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:5", "--rdzv-id=job"]
    conf = "join_timeout=1,last_call_timeout=2,keep_alive_interval=3,keep_alive_max_attempt=4"
    options = parse(*flags, f"--rdzv-conf={conf},close_timeout=5,is_host=0", "--local-addr=me")
    assert options["run_id"] == "job"
    assert options["meeting"] == NodeMeeting(
        endpoint=("a", 5),
        hosting=False,
        address="me",
        timing=Timing(
            join_timeout_s=1.0, last_call_s=2.0, dead_after_s=12.0, beat_s=3.0, close_s=5.0
        ),
    )
    assert parse(*flags)["meeting"].hosting is None
    assert parse(*flags, "--rdzv-conf=store_type=file")["meeting"].endpoint == "a:5"


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (["--rdzv-backend=redis", "--rdzv-endpoint=a:5"], "redis://a:5/?"),
        (["--rdzv-backend=etcd", "--rdzv-endpoint=a:5,b:6"], "etcd://a:5,b:6/?"),
        (["--rdzv-backend=etcd-v2", "--rdzv-endpoint=a:5"], "etcd://a:5/?"),
        (
            [
                "--rdzv-backend=etcd",
                "--rdzv-endpoint=a",
                "--rdzv-conf=protocol=https,cacert=/c,cert=/d,key=/e,etcd_prefix=/jobs",
            ],
            "etcds://a/jobs?ca_cert=/c&cert_cert=/d&cert_key=/e",
        ),
    ],
)
def test_services(flags, url):
    assert parse("--nnodes=2", *flags)["meeting"].endpoint == url


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rdzv-backend=etcd"], "--rdzv-backend etcd needs --rdzv-endpoint HOST:PORT"),
        (["--rdzv-backend=etcd-v2"], "--rdzv-backend etcd needs --rdzv-endpoint HOST:PORT"),
        (
            ["--rdzv-backend=foo"],
            r"unknown --rdzv-backend 'foo' \(known: static, c10d, etcd, redis\)",
        ),
        (["--rdzv-backend=c10d"], "needs --rdzv-endpoint HOST:PORT"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a:x"], "--rdzv-endpoint: .* is not host:port"),
        (["--nnodes=1:2"], "needs --rdzv-backend c10d: static is for a fixed number"),
        (["--node-rank=2"], "--node-rank must be 0 to 1, got 2"),
        (["--node-rank=1", "--nnodes=1"], "--node-rank must be 0 to 0, got 1"),
        (["--nnodes=1", "--rdzv-backend=foo"], "unknown --rdzv-backend 'foo'"),
        (["--nnodes=1", "--rdzv-conf=join_timeout=x"], "join_timeout must be a number of seconds"),
        (["--master-port=0"], "--master-port: port 0 means any free one"),
        (["--rdzv-endpoint=a:0"], "--rdzv-endpoint: port 0 means any free one, which 2 nodes"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=a:0"], "--rdzv-endpoint: port 0 means"),
        (["--standalone"], "--standalone is for one node, but --nnodes is 2:2"),
        (["--rdzv-conf=join_timeout=x"], "join_timeout must be a number of seconds"),
        (["--rdzv-conf=keep_alive_interval=0"], "keep_alive_interval must be more than 0"),
    ],
)
def test_contradictions(flags, message):
    with pytest.raises(InvalidArgumentError, match=message):
        parse("--nnodes=2", *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--rdzv-backend=c10d"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        ["--master-port=0"],
        ["--standalone", "--rdzv-backend=foo", "--node-rank=3", "--rdzv-endpoint=?"],
    ],
)
def test_one_node_needs_no_meeting(flags):
    assert parse(*flags)["meeting"] == NodeMeeting()


@pytest.mark.parametrize("conf", ["join_timeout", "=1", "join_timeout="])
def test_bad_conf(conf):
    with pytest.raises(argparse.ArgumentError, match="--rdzv-conf"):
        parse(f"--rdzv-conf={conf}")


@pytest.mark.parametrize(
    ("conf", "named"),
    [
        ("join_timeout=1,etcd_prefix=/a", ""),
        ("use_libuv=1", "unknown key 'use_libuv' without effect"),
        ("x=1,rank=0,'join_timeout=5'", """unknown keys 'x', "'join_timeout" without effect"""),
    ],
)
def test_unknown_key_is_a_warning_that_names_it_and_the_known_ones(conf, named):
    options = options_of(f"--rdzv-conf={conf}", "--nnodes=2")
    node_options(options)
    assert unknown_conf(options).startswith(
        f"--rdzv-conf: {named} (known: join_timeout, " * bool(named)
    )
    assert bool(unknown_conf(options)) is bool(named)


@pytest.mark.parametrize(
    "conf", ["", "a=1", " a = 1 , 'b=2', c='3'", "a=b=c", '"a=1,b=2"', "a", "=1", "a=", "a= ,b=1"]
)
def test_conf_means_what_it_means_to_torchrun(conf):
    theirs = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")
    try:
        expected = theirs._parse_rendezvous_config(conf)
    except ValueError:
        with pytest.raises(argparse.ArgumentError, match="is not KEY=VALUE"):
            options_of(f"--rdzv-conf={conf}")
    else:
        assert options_of(f"--rdzv-conf={conf}").rdzv_conf == expected


def test_environment_gives_defaults(monkeypatch):
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_ROLE", "trainer")
    monkeypatch.setenv("UNISONO_ROLE", "server")
    monkeypatch.setenv("PET_STANDALONE", "1")
    options = parse()
    assert (options["limits"].max_restarts, options["role"]) == (3, "server")
    assert parse("--max-restarts=4")["limits"].max_restarts == 4
    with pytest.raises(InvalidArgumentError, match="--standalone is for one node"):
        parse("--nnodes=2")


def test_bad_value_in_the_environment(monkeypatch):
    monkeypatch.setenv("PET_MAX_RESTARTS", "many")
    with pytest.raises(argparse.ArgumentError, match="at least 0, got 'many'"):
        parse()


def test_workers_per_node(monkeypatch):
    assert workers_per_node("3") == 3
    cores = len(os.sched_getaffinity(0)) if IS_LINUX else os.cpu_count()
    assert workers_per_node("cpu") == cores
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,4")
    assert (workers_per_node("gpu"), workers_per_node("auto")) == (3, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert workers_per_node("auto") == cores
    for text in ("gpu", "0", "-1", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            workers_per_node(text)
