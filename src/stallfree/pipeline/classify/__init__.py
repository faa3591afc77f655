"""Which steps of a pipeline are deterministic, and which draw random numbers."""
