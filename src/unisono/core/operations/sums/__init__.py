"""Sums that take more than a program of steps: exact ones, and those of codes."""
