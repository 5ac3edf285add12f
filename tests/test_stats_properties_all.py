"""Every public function and class of the statistics has a property test: a new one without fails here."""

from __future__ import annotations

import importlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests import properties


def test_nothing_public_is_without_a_property_test() -> None:
    for file in sorted(Path(__file__).parent.glob("test_stats*.py")):
        importlib.import_module(f"tests.{file.stem}")
    public = properties.public_names()
    assert len(public) > 80
    assert sorted(public - set(properties.COVERED)) == []
    assert sorted(set(properties.COVERED) - public) == []


def test_only_a_test_that_draws_examples_counts() -> None:
    def plain() -> None: ...

    @given(st.integers())
    def drawn(_: int) -> None: ...

    try:
        properties.covers(plain)(plain)
    except AssertionError as error:
        assert "plain draws no examples" in str(error)
    else:
        raise AssertionError("a test without examples was let in")
    assert properties.covers()(drawn) is drawn
