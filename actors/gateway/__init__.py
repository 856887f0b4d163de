"""Rollouts that are programs: a function of the user's, and the address at which it calls the policy."""
