"""Several calls at the same time, in threads of this process."""

from concurrent.futures import ThreadPoolExecutor


def on_threads(*calls):
    """Make all calls at the same time; return their results in order, or raise the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]
