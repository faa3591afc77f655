"""Each test of pictures with the compiled part and without it."""

import pytest

from stallfree.vision import crops


@pytest.fixture(params=["compiled", "plain"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What resizes and decodes: the compiled part, or torch and the usual decoders."""
    if request.param == "plain":
        monkeypatch.setattr(crops, "library", lambda: None)
    elif crops.library() is None:
        pytest.skip("the compiled part is not there: python hatch_build.py makes it")
    name: str = request.param
    return name
