"""Sources of samples, with separate fetch and prep."""
