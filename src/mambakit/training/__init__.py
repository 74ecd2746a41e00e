"""Training language models: text, batches, schedules, the loop, checkpoints of runs; see docs/training.md."""
