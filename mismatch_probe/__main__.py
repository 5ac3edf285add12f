"""``python -m mismatch_probe``."""

import sys

from mismatch_probe.cli import main

sys.exit(main())
