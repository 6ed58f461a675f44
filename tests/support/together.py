"""Several calls at the same time, in threads of this process."""

from concurrent.futures import ThreadPoolExecutor

from unisono.testing.report import RankFailure, report


def on_threads(*calls):
    """Make all calls at the same time; return their results in order, or raise the first error.

    An error that only reports the failure of another rank comes after all others. A note has the
    tracebacks of all calls that failed, where the first call is that of rank 0.
    """
    failed = []

    def attempt(rank, call):
        try:
            return call()
        except BaseException as error:
            failed.append((rank, error))

    with ThreadPoolExecutor(len(calls)) as pool:
        results = list(pool.map(attempt, range(len(calls)), calls))
    if failed:
        failures = {rank: RankFailure.of(error) for rank, error in failed}
        failed.sort(key=lambda each: failures[each[0]].is_peer)
        ordered = {rank: failures[rank] for rank, _ in failed}
        error = failed[0][1]
        error.add_note(report(ordered, len(calls), "threads"))
        raise error
    return results
