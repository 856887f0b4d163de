"""Signs of life of a run: heartbeat, watchdog, inspection, verdict, interrupts, and causes of deaths."""
