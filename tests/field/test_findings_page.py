from __future__ import annotations

from mismatch_probe.diagnosis.catalogue import pages
from tests.field.page import PAGE, cases, markdown


def test_the_page_is_what_the_catalogue_and_the_results_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m tests.field.page"


def test_every_case_names_a_page_of_the_catalogue() -> None:
    known = pages()
    for case in cases():
        assert {case.code, *case.also} <= set(known)
