"""Executors, which build batches: the training process, gather threads and worker processes."""
