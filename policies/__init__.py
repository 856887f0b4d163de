"""Agents, samplers, engines and learning: all that acts and learns inside one process.

The names exported here are light: importing it loads neither torch nor transformers.
"""

from policies.agents.answering import CodingAgent, MathAgent
from policies.agents.base import BaseAgent
from policies.agents.game import GameAgent
from policies.agents.messages import MessagesAgent
from policies.agents.seats import SeatsAgent
from policies.agents.tool import ToolAgent
from policies.learning.preferences import Preference, read_preferences
from policies.sampler import SamplingParams

__all__ = [
    "BaseAgent",
    "CodingAgent",
    "GameAgent",
    "MathAgent",
    "MessagesAgent",
    "Preference",
    "SamplingParams",
    "SeatsAgent",
    "ToolAgent",
    "read_preferences",
]
