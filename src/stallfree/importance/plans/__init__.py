"""Plans: the samples of an epoch, and their order."""
