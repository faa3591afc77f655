"""Executors: the training process, threads and worker processes, which all make batches."""
