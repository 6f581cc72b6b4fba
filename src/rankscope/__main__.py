"""``python -m rankscope``."""

from rankscope.cli.app import main

if __name__ == "__main__":
    main()
