"""Starts servers on each node, finds those of other nodes, and stops them with the job."""
