"""`python -m nemo_ext`: the command, where it is on the path and not installed."""

import sys

from nemo_ext.cli import main

sys.exit(main())
