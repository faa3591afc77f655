"""What decides the ids of an epoch: the order, samplers, importance plans and the moving window."""
