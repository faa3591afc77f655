"""Other loaders, each in a virtual environment of its own (see `venvs.py`)."""
