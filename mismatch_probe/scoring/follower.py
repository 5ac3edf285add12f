"""``python -m mismatch_probe.scoring.follower``: a process that ``--tensor-parallel`` starts beside the first."""

from __future__ import annotations

from mismatch_probe.scoring.parallel import follow

if __name__ == "__main__":
    follow()
