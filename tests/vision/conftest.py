"""Each test of pictures with the compiled part and without it."""

import pytest
from vision_data import needs_library

from stallfree.vision import crops


@pytest.fixture(params=[pytest.param("compiled", marks=needs_library), "plain"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What resizes and decodes: the compiled part, or torch and the usual decoders."""
    if request.param == "plain":
        monkeypatch.setattr(crops, "library", lambda: None)
