"""Analysis of data stalls: measurement, throughput model, simulation, and replay of eviction policies."""
