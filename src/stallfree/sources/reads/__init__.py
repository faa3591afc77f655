"""What a data set reads while it is indexed: recorded, and served from records."""
