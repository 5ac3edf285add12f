"""Which networks stay in memory, and which cannot be used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch

from mismatch_probe.errors import CheckpointError
from mismatch_probe.scoring.heads import choose
from mismatch_probe.scoring.network import Network, ScoringOptions

_MOST, _SPARE = 8, 4
"""Networks that are held at most; one more than usual where so many times the largest one's size is free."""


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, for a CPU within the limits of the system and of its container; None unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        most, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
        if most.is_file() and (limit := most.read_text().strip()) != "max":
            found.append(int(limit) - int(used.read_text()))
        return min(found)
    except (OSError, ValueError):
        return None


class Networks:
    """The most recently used networks, by directory.

    Args:
        options: how they are loaded.
        base: the model below checkpoints that are adapters.
        capacity: how many stay loaded, and more where there is much memory.
        on_unusable: called with the error of a checkpoint that cannot be loaded, which then counts as absent; None
            raises it.
        on_notice: called with what a user must know of how a network is run.
    """

    def __init__(
        self,
        options: ScoringOptions,
        base: Path | None = None,
        capacity: int = 2,
        on_unusable: Callable[[CheckpointError], None] | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._options, self._base, self._capacity = options, base, capacity
        self._on_unusable, self._on_notice = on_unusable, on_notice
        self._networks: OrderedDict[Path, Network] = OrderedDict()
        self._unusable: set[Path] = set()

    def touch(self, paths: list[Path]) -> None:
        """Mark networks as used just now, where they are loaded."""
        for path in paths:
            if path in self._networks:
                self._networks.move_to_end(path)

    def get(self, path: Path) -> Network:
        """The network at ``path``, loaded if need be.

        Raises:
            CheckpointError: it cannot be loaded.
        """
        if path not in self._networks:
            self._make_room()
            network = Network(path, self._options, self._base)
            if network.no_packing:
                why = network.no_packing
                self._on_notice(f"{network.architecture}: prompts are not shared and sequences are padded, since {why}")
            if notice := choose(network, self._options.head):
                self._on_notice(notice)
            self._networks[path] = network
        self._networks.move_to_end(path)
        return self._networks[path]

    def _make_room(self) -> None:
        """Let go of networks that were not used for long: down to the capacity, but for those that memory has room for.

        In-flight updates need several versions at once, and loading one takes as long as scoring thousands of tokens.
        """
        alone = self._options.tensor_parallel == 1  # processes that load together must let go together
        while len(self._networks) >= self._capacity:
            largest = max(network.bytes for network in self._networks.values())
            free = free_memory(self._options.torch_device()) if alone else None
            if len(self._networks) < _MOST and free is not None and free > _SPARE * largest:
                return
            self._networks.popitem(last=False)

    def release(self) -> bool:
        """Let go of the networks beyond the capacity; False where there is none."""
        spare = len(self._networks) - self._capacity
        for _ in range(spare):
            self._networks.popitem(last=False)
        return spare > 0

    def usable(self, path: Path | None, beside: Path | None = None) -> Path | None:
        """The path, where its network can be loaded and has the vocabulary of the one beside it.

        Raises:
            CheckpointError: it cannot, and nobody asked to be told of it instead.
        """
        if path is None or path in self._unusable:
            return None
        try:
            rows = self.get(path).vocab_size
            if beside is not None and rows != (others := self.get(beside).vocab_size):
                raise CheckpointError(
                    f"{path} has {rows} output rows and {beside} has {others}. "
                    "Both must be exported with the same vocabulary padding"
                )
        except CheckpointError as error:
            if self._on_unusable is None:
                raise
            self._unusable.add(path)
            self._on_unusable(error)
            return None
        return path

    @property
    def vocab_size(self) -> int:
        """Largest vocabulary among the loaded networks, 1 where none is."""
        return max((network.vocab_size for network in self._networks.values()), default=1)

    @property
    def unusable(self) -> frozenset[Path]:
        """Checkpoints that count as absent."""
        return frozenset(self._unusable)
