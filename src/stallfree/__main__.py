"""`python -m stallfree` is the same as `stallfree`."""

from stallfree.cli import main

if __name__ == "__main__":
    main()
