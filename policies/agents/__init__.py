"""Agents: message history and parsing. Agents hold no weights."""
