"""Dumps that hold decoded text: recognised, and answered with what they lack and how that framework would log it.

Nothing is tokenised again: a text has many tokenisations, and no text holds the engine's log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mismatch_probe.errors import NothingToJudgeError
from mismatch_probe.readers.files import parse_json
from mismatch_probe.readers.options import ReadOptions
from mismatch_probe.readers.sniff import TEXT_ENDINGS, first_json
from mismatch_probe.run import Run

_LARGEST = 64 << 20
_TRIED = 8
"""Files looked at: a folder of dumps may hold something else beside them."""


@dataclass
class TextDump:
    """A reader that recognises a format and says why nothing can be computed from it.

    ``find`` returns a file of the format below a directory, or None; ``answer`` follows the file's name.
    """

    FORMAT: str
    LOOKS_FOR: str
    find: Callable[[Path], Path | None]
    answer: str

    def matches(self, path: Path) -> bool:
        """True when the directory holds such a file, judged by content."""
        return self.find(path) is not None

    def read(self, path: Path, options: ReadOptions) -> Run:
        """Never reads.

        Raises:
            NothingToJudgeError: always; it says what is missing and how to log it.
        """
        raise NothingToJudgeError(f"{self.find(path) or path}: {self.answer}")


def _swift(path: Path) -> Path | None:
    """ms-swift: a line is a table, its columns lists."""

    def fits(value: Any) -> bool:
        columns = [value.get(key) for key in ("step", "gen_step") if key in value] + [value.get("completion")]
        return len(columns) > 1 and "prompt" in value and all(isinstance(column, list) for column in columns)

    # The output directory holds a folder for each launch: v0-20260101-120000.
    return _first(path, ("completions.jsonl", "v*-*/completions.jsonl"), fits)


def _areal(path: Path) -> Path | None:
    """AReaL: text with its lengths in tokens and the versions of its weights."""
    wanted = {"task_id", "seqlen", "prompt_len", "head_version", "tail_version", "prompt", "completion"}
    patterns = ("*.jsonl", "[0-9]*/*.jsonl", "rollout/[0-9]*/*.jsonl")
    return _first(path, patterns, lambda value: wanted <= set(value))


def _rllm(path: Path) -> Path | None:
    """rllm: a JSON file an episode."""
    patterns = ("episode_*.json", "*_step_*_epoch_*/episode_*.json", "episodes/*_step_*_epoch_*/episode_*.json")
    wanted = {"training_step", "episode_id", "trajectories"}
    for file in _candidates(path, patterns):
        try:
            with file.open("rb") as stream:
                value = parse_json(stream.read(_LARGEST))
        except (OSError, ValueError):
            continue
        if isinstance(value, dict) and wanted <= set(value):
            return file
    return None


def _first(path: Path, patterns: tuple[str, ...], fits: Callable[[dict[str, Any]], bool]) -> Path | None:
    endings = tuple(pattern + ending for pattern in patterns for ending in TEXT_ENDINGS)
    for file in _candidates(path, endings):
        value = first_json(file)
        if isinstance(value, dict) and fits(value):
            return file
    return None


def _candidates(path: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    return islice(chain.from_iterable(islice(path.glob(pattern), _TRIED) for pattern in patterns), 4 * _TRIED)


_WHY = (
    "decoded text, without token ids and the engine's log-probs. Text does not give the tokens back, and nothing gives "
    "the log-probs back, so neither D nor the lag nor the log-ratio can be computed. "
)

SWIFT = TextDump(
    "ms-swift",
    "completions.jsonl of ms-swift, a table a line",
    _swift,
    f"ms-swift's log_completions writes {_WHY}No option of ms-swift writes them (log_rollout_offpolicy_metrics gives "
    "the blended KL and ESS, as scalars only). Override GRPOTrainer._log_rollout(samples), whose samples hold "
    "response_token_ids and, with vLLM, rollout_logprobs, and write them with mismatch_probe.log.RolloutWriter: see "
    "docs/frameworks.md",
)
AREAL = TextDump(
    "areal",
    "AReaL's dump_to_file (JSONL with prompt_len, head_version and tail_version)",
    _areal,
    f"AReaL's dump_to_file writes {_WHY}It keeps special tokens, lengths and versions, so tokenising it again would "
    "often give ids of the right number. That is no proof that they are those that were sampled, and would give the "
    "trainer's log-probs only: it is never done here. The dict that a RolloutWorkflow's arun_episode returns holds "
    "input_ids, loss_mask, logprobs and versions: wrap it, and write them with mismatch_probe.log.RolloutWriter: see "
    "docs/frameworks.md",
)
RLLM = TextDump(
    "rllm",
    "episodes of rllm (episode_*.json with trajectories)",
    _rllm,
    f"rllm's log_episodes writes {_WHY}The Step objects of an episode hold prompt_ids, response_ids, logprobs and "
    "weight_version in memory: pass the trainer an EpisodeLogger whose log_episode hands them to "
    "mismatch_probe.log.RolloutWriter: see docs/frameworks.md",
)
