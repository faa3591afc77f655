"""Related processes: starting, connecting and ending them, and the resources that they share."""
