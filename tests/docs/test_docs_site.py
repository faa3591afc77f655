"""The site builds without a warning, has every page and name, and its pages take nothing from elsewhere."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_tools import PAGES, ROOT

import stallfree as sf

TAGS = r"link(?! rel=\"canonical)|script|img|iframe|source|object"
TAKEN = rf"<(?:{TAGS})\b[^>]*? (?:href|src|data)=\"?((?:https?:)?//[^\" >]*)"
"""What a page asks for elsewhere when it is opened."""


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    if not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))):
        pytest.skip("needs mkdocs-material and mkdocstrings: pip install 'stallfree[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    for page in PAGES:
        if page.parent != ROOT:
            name = page.relative_to(ROOT / "docs").with_suffix("")
            assert (tmp_path / (name.parent if name.name == "index" else name) / "index.html").is_file(), name
    text = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert re.findall(TAKEN, text) == []
    assert {f"stallfree.{name}" for name in sf.__all__ if not hasattr(getattr(sf, name), "__path__")} <= {
        *re.findall(r' id="(stallfree\.\w+)"', text)
    }
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", sheet.read_text()), sheet
