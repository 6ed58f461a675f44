"""Tests: units, worlds of several ranks, launches, faults, torch, the project, and all the rest."""
