"""Training: devices, memory, programs, the loop, checkpoints, evaluation, progress."""
