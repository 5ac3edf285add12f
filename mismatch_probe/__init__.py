"""Split the training-inference mismatch of an LLM RL run into engine numerics and stale weights."""

from mismatch_probe.errors import ExitCode, MismatchProbeError

__version__ = "0.1.0"

__all__ = ["ExitCode", "MismatchProbeError", "__version__"]
