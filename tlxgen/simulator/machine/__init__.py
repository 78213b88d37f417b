"""The simulated GPU: scheduler, memories, barriers and asynchronous copies, and the checks on their use."""
