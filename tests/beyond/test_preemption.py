"""`should_stop` in a process that ends."""

from tests.support.programs import python

LATE = """
import os, signal
import unisono as dist

class AtTheEnd:
    '''Sends a signal after Python has restored the default handlers.'''
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGTERM):
        kill(pid, signum)

at_the_end = AtTheEnd()
dist.init_process_group(rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
if {asks}:
    assert not dist.should_stop()
dist.destroy_process_group()
"""


def test_a_signal_that_comes_late_does_not_end_a_rank_that_has_stopped_in_time():
    assert python("-c", LATE.format(asks=False)).returncode == -15
    ended = python("-c", LATE.format(asks=True))
    assert ended.returncode == 0, ended.stderr
