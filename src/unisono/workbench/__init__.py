"""The tools around a job: the commands, measuring, simulating, explaining, reading traces."""
