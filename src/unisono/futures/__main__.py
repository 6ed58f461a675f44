"""`python -m unisono.futures PROGRAM`: rank 0 runs it, the others are its executors' workers."""

from unisono.beyond.pool.executor import main

if __name__ == "__main__":
    main()
