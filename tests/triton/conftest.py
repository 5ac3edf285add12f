"""These tests run Triton's kernels on the CPU; ``make test-triton`` makes the environment that they need."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":  # Triton looks at it when it is first imported
    raise pytest.UsageError("Use make test-triton, or set TRITON_INTERPRET=1")
