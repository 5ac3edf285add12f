"""``python -m mismatch_probe``."""

import sys

from mismatch_probe.entry import main

sys.exit(main())
