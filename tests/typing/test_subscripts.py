"""Generic classes can be subscripted at run time."""

import stallfree as sf


class Numbers(sf.DataLoader[list[int]]):
    pass


def test_a_subscript_makes_a_loader_and_a_base_class() -> None:
    for kind in (Numbers, sf.DataLoader[list[int]]):
        with kind([1, 2, 3], batch_size=2, collate_fn=list) as loader:
            assert list(loader) == [[1, 2], [3]]
