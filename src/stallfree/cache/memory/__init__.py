"""The sample cache in shared memory: arena, index, readers and writers, recovery."""
