"""What unisono.spark must do, in a local Spark of this host."""

import sys
import threading

from pyspark.sql import SparkSession

import unisono as dist
import unisono.spark
from tests.adapters.clusters import program, ranks
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveMismatchError,
    InvalidArgumentError,
    LaunchError,
    PeerLostError,
    RendezvousError,
    WorkerFailedError,
)

run = unisono.spark.run


class Absent:
    """An argument that only this process can unpickle."""

    def __reduce__(self):
        return __import__, ("absent",)


def exit_on_rank_0():
    if dist.get_rank() == 0:
        sys.exit(0)
    dist.barrier()


def groups_of_2_and_3(spark):
    for size in (3, 2):
        assert run(spark, ranks.summed, size, 2.0) == ranks.expected(size, 2.0)
    assert run(spark.sparkContext, ranks.summed, 3, 3.0) == ranks.expected(3, 3.0)


def token_is_not_in_the_environment(spark):
    assert run(spark, ranks.token, 2, timeout=50) == [("", 1800.0)] * 2


def mismatch_is_named(spark):
    with program.error(CollectiveMismatchError, "all_reduce #1", "float64[4]", "Spark task"):
        run(spark, ranks.mismatched, 3)


def first_error_is_raised(spark):
    with program.error(KeyError, "of rank 1", "Spark task 1", rank=1):
        run(spark, ranks.raising, 3, 1)
    with program.error(KeyError, "ranks [0, 1] had not ended 2 s later", rank=2):
        run(spark, ranks.working, 3, 30, 2)
    # Raised when the task pickles the result.
    with program.error(TypeError, "cannot pickle", rank=0):
        run(spark, threading.Lock, 1)
    # Raised when Spark unpickles the function: a module that the executors lack, for instance.
    with program.error(
        WorkerFailedError, "raised ModuleNotFoundError: No module named 'absent'", "outside of the"
    ):
        run(spark, print, 2, Absent())
    # It must not end the caller.
    with program.error(WorkerFailedError, "rank 0 of 2 raised SystemExit: 0", rank=0):
        run(spark, exit_on_rank_0, 2)


def unknown_backend_ends_the_start(spark):
    with program.error(InvalidArgumentError, "unknown backend 'none'"):
        run(spark, ranks.summed, 2, 1.0, backend="none")


def lost_rank_is_named(spark):
    with program.error(PeerLostError, "rank 1", peers=(1,)):
        run(spark, ranks.dying, 3, 1, 7)
    assert run(spark, ranks.summed, 3, 1.0) == ranks.expected(3, 1.0)
    with program.error(
        PeerLostError, "rank 0 of 3 (Spark task 0) was lost: Python worker exited", peers=(0,)
    ):
        run(spark, ranks.dying_alone, 3, 0)
    assert run(spark, ranks.summed, 3, 1.0) == ranks.expected(3, 1.0)


def too_few_slots_are_named(spark):
    with program.error(
        RendezvousError, "4 of 4 ranks had not started after 1 s: rank 0 (Spark task 0)",
        "there are 3 slots", peers=(0, 1, 2, 3),
    ):  # fmt: skip
        run(spark, ranks.summed, 4, 1.0, timeout=1)
    assert run(spark, ranks.summed, 3, 1.0) == ranks.expected(3, 1.0)


def arguments_are_checked(spark):
    with program.error(InvalidArgumentError, "a group needs at least 1 rank, got 0"):
        run(spark, ranks.summed, 0)
    with program.error(ArgumentTypeError, "size must be an integer, got 2.0"):
        run(spark, ranks.summed, 2.0)
    with program.error(
        ArgumentTypeError,
        "spark must be a SparkSession with a SparkContext, which Spark Connect lacks, got",
    ):
        run("spark", ranks.summed, 2)


def end_of_spark_is_an_error(spark):
    threading.Timer(2, spark.sparkContext.cancelAllJobs).start()
    with program.error(LaunchError, "Spark ended the job: "):
        run(spark, ranks.time.sleep, 2, 60)


CASES = [
    groups_of_2_and_3,
    token_is_not_in_the_environment,
    mismatch_is_named,
    first_error_is_raised,
    unknown_backend_ends_the_start,
    lost_rank_is_named,
    too_few_slots_are_named,
    arguments_are_checked,
    end_of_spark_is_an_error,
]


def session(master):
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    started = builder.config("spark.driver.memory", "512m").getOrCreate()
    started.sparkContext.setLogLevel("OFF")
    return started


def lost_rank_is_named_with_4_attempts(spark):
    """Spark does not repeat a barrier stage that ends a job."""
    spark.stop()
    with program.error(ClosedError, "the SparkContext is stopped"):
        run(spark, ranks.summed, 2, 1.0)
    again = session("local[3, 4]")
    with program.error(PeerLostError, "rank 0 of 3 (Spark task 0) was lost", peers=(0,)):
        run(again, ranks.dying_alone, 3, 0)


CASES.append(lost_rank_is_named_with_4_attempts)

if __name__ == "__main__":
    try:
        program.main(CASES, session("local[3]"))
    finally:
        SparkSession.getActiveSession().stop()
