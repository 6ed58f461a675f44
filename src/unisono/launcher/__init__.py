"""The agent of the launcher, and `spawn`: start worker processes, watch them and stop them."""

from unisono.launcher.agent import Agent
from unisono.launcher.launch import launch
from unisono.launcher.spawn import SpawnContext, spawn
from unisono.launcher.spec import LaunchResult, LaunchSpec

__all__ = ["Agent", "LaunchResult", "LaunchSpec", "SpawnContext", "launch", "spawn"]
