"""One launch on several hosts, through ssh."""
