"""Parts for other libraries. Each module imports its library, so they are imported by name when they are wanted."""
