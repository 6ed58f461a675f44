"""What stands on another library: torch, MPI, NCCL, and Ray, Dask and Spark.

Only the packages here import their libraries. Nothing below knows them: the backends and the engine
are found by entry points, as those of other packages are.
"""
