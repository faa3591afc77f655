"""`cache="auto"`: measures fetch and prep, and chooses what to cache."""
