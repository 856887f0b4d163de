"""Programs that a run's metrics go to, beside its own ``metrics.jsonl``: those of ``run.trackers``."""
