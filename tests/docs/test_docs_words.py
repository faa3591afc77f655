"""Pages and code use the field's words."""

from __future__ import annotations

import re

from doc_pages import PAGES, ROOT

_AVOIDED = re.compile(
    r"\b(whoever|nobody|told|tells|anew|clerks?|post office|shel(f|ves)|crews?|lanes?|Filler|Filling|first_look"
    r"|conductors?|portions?|one_pass|feeders?|Onward)\b"
)


def test_no_page_and_no_source_has_a_private_word() -> None:
    files = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.md")]
    found = [f"{file}: {match.group()}" for file in files for match in _AVOIDED.finditer(file.read_text())]

    assert found == []
