"""`DataLoader`: iterates over the epochs of a data set, and yields batches."""
