"""From a schedule to the program of one rank: rows of integers, in elements."""
