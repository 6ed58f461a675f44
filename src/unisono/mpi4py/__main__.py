"""`python -m unisono.mpi4py PROGRAM`: run a program for mpi4py on unisono."""

from unisono.adapters.mpi4py.names import main

if __name__ == "__main__":
    main()
