"""Faults that are put into a run on purpose, to see whether it keeps its promises: for ``launch.chaos``."""
