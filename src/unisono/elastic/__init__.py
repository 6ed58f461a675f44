"""The launcher's agent and `spawn`: start worker processes, watch them, end them together."""

from unisono.elastic.agent import Agent, LaunchResult, LaunchSpec
from unisono.elastic.report import Failure
from unisono.elastic.spawn import SpawnContext, spawn

__all__ = ["Agent", "Failure", "LaunchResult", "LaunchSpec", "SpawnContext", "spawn"]
