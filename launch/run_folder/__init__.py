"""Files of a run's folder: checkpoints, trajectories, the log of consumed rollouts, and the lock."""
