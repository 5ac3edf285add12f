"""What lies around verl's dump: the config that hydra saved, the checkpoints, the model that training began with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_probe.errors import BadFileError
from mismatch_probe.readers.config_files import lookup, read_config, settings_in
from mismatch_probe.readers.settings import Found
from mismatch_probe.run import CheckpointPattern

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_KEYS = (
    ("name", "trainer.experiment_name"),
    ("model", "actor_rollout_ref.model.path"),
    ("temperature", f"{_ROLLOUT}.temperature"),
    ("top_p", f"{_ROLLOUT}.top_p"),
    ("top_k", f"{_ROLLOUT}.top_k"),
    ("logprobs_mode", f"{_ROLLOUT}.logprobs_mode"),
    ("trainer_dtype", f"{_ACTOR}.fsdp_config.dtype"),
    ("max_response_length", "data.max_response_length"),
)
_MODES = {"processed_logprobs": "processed", "raw_logprobs": "raw"}
_CONFIGS = (".hydra/config.yaml", "config.yaml", "outputs/*/*/.hydra/config.yaml", "*/.hydra/config.yaml")


def saved_config(path: Path, dump: Path) -> tuple[Found, list[str]]:
    """Settings that the run's own config states, and what the user must know of it.

    Hydra saves it as ``.hydra/config.yaml`` of the directory that it made for the launch; the newest one wins. Values
    that refer to other keys (``${...}``) are passed over.

    Raises:
        BadFileError: the config cannot be parsed.
    """
    found: dict[str, tuple[Any, str]] = {"name": (dump.parent.name if dump != path else path.name, "directory name")}
    files = sorted({file for pattern in _CONFIGS for file in path.glob(pattern) if file.is_file()}, key=_written)
    configs = [(file, config) for file in files if "actor_rollout_ref" in (config := _config(file))]
    if not configs:
        return found, []
    file, config = configs[-1]
    name = file.relative_to(path).as_posix()
    for key, (value, where) in settings_in(config, name, _KEYS).items():
        known = _MODES.get(value) if key == "logprobs_mode" else value
        if known is not None and not (isinstance(known, str) and "${" in known):
            found[key] = (known, where)
    return found, _notices(config, name)


def checkpoint_pattern(
    path: Path, given: str | None, search: bool = True
) -> tuple[CheckpointPattern | None, list[str]]:
    """Where the actor's weights of each version are: as declared, else below the run directory; and what to say."""
    if given is not None:
        return CheckpointPattern(path, given), []
    if not search:
        return None, []
    depths = ("", "*/", "*/*/", "*/*/*/")
    homes = sorted({actor.parent.parent for depth in depths for actor in path.glob(f"{depth}global_step_*/actor")})
    names = [home.relative_to(path).as_posix() for home in homes]
    advice = "--set checkpoints='DIR/global_step_{version}/actor' names them (DIR is trainer.default_local_dir)"
    if len(homes) != 1:
        what = f"checkpoints lie in {', '.join(names)}" if homes else "no checkpoints below the directory"
        return None, [f"{what}. {advice}"]
    if set(names[0]) & set("{}"):
        return None, [f"checkpoints lie in {names[0]}, whose braces cannot be in a pattern. {advice}"]
    prefix = "" if names[0] == "." else f"{names[0]}/"
    return CheckpointPattern(path, f"{prefix}global_step_{{version}}/actor"), [f"checkpoints found in {names[0]}"]


def initial_model(model: str) -> Path | None:
    """The directory of version 0, where the config names one that is on this machine."""
    path = Path(model) if model else None
    return path if path is not None and path.is_absolute() and (path / "config.json").is_file() else None


def _written(file: Path) -> float:
    return file.stat().st_mtime


def _config(file: Path) -> Mapping[str, Any]:
    try:
        return read_config(file)
    except BadFileError:
        # A config.yaml of some other program is no reason to stop; hydra's own is.
        if file.parent.name == ".hydra":
            raise
        return {}


def _notices(config: Mapping[str, Any], name: str) -> list[str]:
    said = []
    if lookup(config, "algorithm.rollout_correction.bypass_mode") is True:
        said.append(
            f"{name}: algorithm.rollout_correction.bypass_mode: verl takes the sampler's log-probs for its old "
            "ones, so its own rollout_corr metrics show no mismatch whatever it is. The dump holds no such copy"
        )
    if lookup(config, f"{_ROLLOUT}.calculate_log_probs") is False:
        said.append(f"{name}: {_ROLLOUT}.calculate_log_probs is off: the sampler's log-probs were not kept")
    if lookup(config, "algorithm.adv_estimator") == "remax":
        said.append(
            f"{name}: algorithm.adv_estimator is remax: V0 dumps may hold one greedy baseline a prompt after the "
            "samples; only those that __do_sample__ marks are set aside"
        )
    return said
