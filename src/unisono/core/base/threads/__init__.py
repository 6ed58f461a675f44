"""Waiting and threads: deadlines, completions, streams, threads of this library."""
