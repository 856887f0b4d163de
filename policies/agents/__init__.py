"""How to act: message history and parsing. Agents hold no weights."""
