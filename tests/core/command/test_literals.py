"""Texts in overrides are read as they were."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.core.command.literals import in_quotes


@given(st.text(st.sampled_from("a/ \\'\",:{}[]$ü\n"), max_size=8))
def test_a_quoted_text_is_read_as_it_was(text):
    override = OverridesParser.create().parse_override(f"key={in_quotes(text)}")
    assert override.value() == text
