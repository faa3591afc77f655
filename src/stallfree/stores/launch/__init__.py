"""Starts servers on each node, finds those of other nodes, and ends them with the job."""
