"""``python -m grpojax``: the command line."""

import sys

from grpojax.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
