"""The launcher's agent and `spawn`: start worker processes, watch them, end them together."""

from unisono.elastic.agent import Agent
from unisono.elastic.launch import launch
from unisono.elastic.report import Failure
from unisono.elastic.spawn import SpawnContext, spawn
from unisono.elastic.spec import LaunchResult, LaunchSpec

__all__ = ["Agent", "Failure", "LaunchResult", "LaunchSpec", "SpawnContext", "launch", "spawn"]
