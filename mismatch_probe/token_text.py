"""Ids to text, with the tokenizer that lies beside a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from mismatch_probe.errors import InputError

FILE = "tokenizer.json"


def find_tokenizer(run_dir: Path, checkpoints: Iterable[str]) -> Path | None:
    """The tokenizer of a run: in its ``tokenizer`` folder, beside a checkpoint's weights, or in the run itself.

    Args:
        run_dir: the run.
        checkpoints: paths of its checkpoints, relative to it.
    """
    folders = (run_dir / "tokenizer", *(run_dir / name for name in checkpoints), run_dir)
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


def text_of_ids(path: Path) -> Callable[[int], str]:
    """A function from one id to its text.

    Args:
        path: a ``tokenizer.json``, or a folder that holds one.

    Raises:
        InputError: it cannot be read.
    """
    from tokenizers import Tokenizer

    file = path / FILE if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises its own base Exception
        raise InputError(f"{file}: no tokenizer ({str(error).splitlines()[0]}). Name a tokenizer.json") from None

    def text(token_id: int) -> str:
        name = tokenizer.id_to_token(token_id)
        if name is None:
            return f"<{token_id}>"
        decoded: str = tokenizer.decode([token_id], skip_special_tokens=False)
        # A lone token loses the space before it, and a part of a character its text.
        if not decoded or "\ufffd" in decoded:
            return str(name)
        return f" {decoded.lstrip()}" if name[0] in "\u0120\u2581" else decoded

    return text
