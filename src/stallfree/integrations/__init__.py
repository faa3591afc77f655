"""Integrations with other libraries. Each module imports its library, so import the modules by name as needed."""
