"""The simulated machine: memories, barriers, tasks, the scheduler, and the checks on their use."""
