"""The launcher's agent and `spawn`: start worker processes, watch them, end them together."""

from unisono.launcher.agent import Agent
from unisono.launcher.launch import launch
from unisono.launcher.report import Failure
from unisono.launcher.spawn import SpawnContext, spawn
from unisono.launcher.spec import LaunchResult, LaunchSpec

__all__ = ["Agent", "Failure", "LaunchResult", "LaunchSpec", "SpawnContext", "launch", "spawn"]
