"""What is measured in stallfree's own environment: stallfree, torch's loader and the limit of the memory."""
