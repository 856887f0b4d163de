"""Limits of what one HTTP request may ask for: checked before anything long is computed.

A replica answers strangers in the process that steps the engine, so whatever is long or quadratic would hold
rollouts up too.
"""

from __future__ import annotations

MAX_BODY_BYTES = 4 * 2**20
MAX_BODY_SECONDS = 30.0
MAX_MESSAGES = 2000
MAX_CHOICES = 128
"""Prompts times choices of each."""
MAX_PICTURES = 16
"""Pictures of one request: the largest takes 75 ms to read, the first time."""
MAX_STORED = 1000
"""Things of one kind that are kept for an API key: the oldest are forgotten first."""
MAX_TOKENS = 2**20
"""Tokens of all prompts and choices of one request together."""
MAX_STRUCTURE_CHARACTERS = 2**16
"""Characters of the schemas that an answer has to follow, as JSON: the engine makes a grammar of them."""
MAX_SCHEMA_DEPTH = 32
"""Objects and lists of a schema within each other. The engine's time grows with the cube of it: 32 take 0.1 s
where the schemas are as long as they may be, and 400 took 15 s in 4 kB."""
MAX_LIKELY_TOKENS = 20
"""Likely tokens whose log-probabilities come with each token: as many as OpenAI has, and vLLM."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
"""A stop string is searched for at the end of every piece of a stream, in all of its beginnings."""
