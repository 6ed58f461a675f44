"""What workers write: read from pipes, shown on the console, kept in files."""
