"""The sample cache in shared memory or on a disk: arena, index, readers and writers, recovery."""
