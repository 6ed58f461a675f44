"""Recorded jobs in virtual time: on another network, with more ranks, with a slow one.

A `Job` is what each rank does: it computes, makes calls, and waits for them. `records` and `chakra`
make jobs of files, `scale` changes their ranks, `pricing` says how long calls take, and `engine`
runs a job. Concurrent calls do not compete for links, and compute does not slow calls.
"""
