"""The command line as `python -m kvrelay`."""

from kvrelay.cli import main

if __name__ == "__main__":
    main()
