"""Collectives and messages of Python objects."""
