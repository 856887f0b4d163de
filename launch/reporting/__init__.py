"""Reports of a run: metrics, plots, conversations, logs for Inspect, and the audit of its folder."""
