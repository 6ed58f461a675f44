"""Programs of Python in processes of their own."""

import subprocess
import sys


def python(*words, limit_s=100.0, **options):
    """Run Python with these words to its end; return exit code, output and errors as text."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, **options)


def start_python(*words, **options):
    """Start Python with these words; its standard input and output are pipes."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
