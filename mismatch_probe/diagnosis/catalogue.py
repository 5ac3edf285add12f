"""The page of every code: what ``explain`` prints and ``docs/findings.md`` is made of."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch_probe.errors import UsageError

FAMILIES = {
    "1": ("alignment", "tokens, log-probs and masks that do not belong together"),
    "2": ("weights", "a sampler that does not hold the weights it is said to hold"),
    "3": ("numerics", "two programs that compute one network differently"),
    "4": ("semantics", "log-probs of another distribution than the one that is trained"),
    "5": ("values", "numbers that no distribution gives, or that were lost"),
    "6": ("dump", "files that are torn, mixed up or incomplete"),
    "7": ("monitoring", "a metric that misleads though the run is sound"),
}


@dataclass(frozen=True)
class Page:
    """One code.

    ``what``: the fault, in a sentence or two. ``seen_by``: the signature that the check looks for. ``refuted_by``: what
    would show that it is not this. ``remedy``: what to do. ``sources``: public reports, "owner/name#number".
    """

    code: str
    name: str
    what: str
    seen_by: str
    refuted_by: str
    remedy: str
    sources: tuple[str, ...] = ()


def pages() -> dict[str, Page]:
    """Every page by code, ascending."""
    from mismatch_probe.diagnosis.diagnose import FAMILY_MODULES

    found = {page.code: page for module in FAMILY_MODULES for page in module.PAGES}
    return dict(sorted(found.items()))


def page(code: str) -> Page:
    """The page of one code, in any case.

    Raises:
        UsageError: there is none.
    """
    known = pages()
    if (found := known.get(code.upper())) is None:
        raise UsageError(f"{code}: no such finding. Known are {', '.join(known)}")
    return found
