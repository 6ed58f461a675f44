"""Several bodies in one world: processes take a while to start."""

import unisono as dist


def run_all(rank, bodies):
    for body in bodies:
        try:
            body(rank)
        except Exception as error:
            error.add_note(f"in {body.__name__}")
            raise
        dist.barrier()
