"""Settings: each is declared once, with its default, its bound and the sentence that ``--help`` prints.

    actors/settings.py  policies/settings.py  policies/learning/settings.py     of the parts, in their layers
            └──────────────────┬─────────────────────┘
                            tree.py         TrainConfig: one tree of dataclasses
                               │
    command line, recipe,   compose.py ◀── unknown.py     names that nobody knows, and what stands for them
    dict, settings.yaml ──▶    │
                               ▼
                          TrainConfig ──▶ launch/validation/   bounds first, then one setting against another

``command.py`` is what commands with settings share, and prints the same tree as their help.
"""
