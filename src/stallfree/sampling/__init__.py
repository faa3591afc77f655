"""Epoch sources, which decide the ids of an epoch: order, samplers, importance plans and the moving window."""
