"""Waiting and threads: completions, streams, threads of this library."""
