"""``python -m rankscope``."""

import os
import sys

# Python puts the current folder (or the folder of this file) first on sys.path: a torch.py in a downloaded folder would
# run instead of torch. Nothing must be imported from there.
if sys.path and sys.path[0] in ("", os.getcwd(), os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]

from rankscope.cli.app import main

if __name__ == "__main__":
    main()
