"""``python -m rankscope``."""

import os
import sys

# Python puts the current folder (or the one of this file) before all libraries: a file torch.py in a folder that was
# downloaded would run instead of torch. Nothing here is imported from there.
if sys.path and sys.path[0] in ("", os.getcwd(), os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]

from rankscope.cli.app import main

if __name__ == "__main__":
    main()
