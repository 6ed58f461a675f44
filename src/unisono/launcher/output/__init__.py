"""The output of the workers: read from pipes, shown on the console, written to files."""
