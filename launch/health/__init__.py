"""Whether a run moves, and what holds it up if not: told to the cluster, asked of the parts, judged."""
