"""The transform pipeline of a sample: its steps, their cacheable part and its key, and their random generators."""
