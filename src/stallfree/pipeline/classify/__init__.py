"""Classification of pipeline steps as deterministic or random."""
