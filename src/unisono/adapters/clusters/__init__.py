"""Groups whose ranks are Ray actors, Dask workers or tasks of a Spark barrier stage.

`unisono.ray`, `unisono.dask` and `unisono.spark` export the functions. Each module needs its
framework and nothing else; the other modules here need none.

1. `meeting`: a store with a token of its own, in a process that can close it while ranks wait.
2. `member`: a rank in its process: join the group, call a function, leave.
3. `outcomes`: the caller, which collects the results and finds the first cause of a failure.
"""
