"""What a data set reads when it is indexed, found out on one of the first samples: for `form="reads"`."""

from __future__ import annotations

from typing import Any

from stallfree.batches.recorded_reads import record_sample
from stallfree.datasets.dataset_probe import ATTEMPTS, FirstLook
from stallfree.errors import InputError, SampleError
from stallfree.pipeline._objects import class_functions, code_names, is_library, used_globals
from stallfree.pipeline.classify.determinism import Split
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.generators import find_generators, global_generators, preserved
from stallfree.pipeline.protocol import Source, sample_error
from stallfree.sources.mapped import MapSource, as_source
from stallfree.sources.open_calls import install
from stallfree.sources.recorded import files_of

_NATIVE = {
    "imread": "cv2.imdecode(np.frombuffer(data, np.uint8), flags) in place of cv2.imread(path)",
    "read_image": "torchvision.io.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8)) in place of "
    "torchvision.io.read_image(path)",
    "read_file": "torch.frombuffer(bytearray(data), dtype=torch.uint8) in place of torchvision.io.read_file(path)",
}
"""Functions that open files natively, and what to call in their place, with `data = open(path, 'rb').read()`."""


def reads_source(dataset: Any) -> MapSource:
    """`dataset` as a source that is indexed. Raises `InputError` for one whose records can be cached as such."""
    install()  # now, as fingerprints of modules that hold `open` change with it
    source = as_source(dataset, apart=False)
    if isinstance(source, MapSource):
        return source
    raise InputError(
        f"form='reads' is for plain data sets that read and augment in __getitem__, and {type(source).__name__} keeps "
        "the two apart: use form='fetched', which caches the same bytes"
    )


def look_at_reads(source: Source, steps: Compose) -> FirstLook:
    """Index the first sample that can be had once; what it reads is the record.

    The generators are left as they were. Raises `SampleError` when none of the first samples can be had, `InputError`
    when nothing was read that can be cached.
    """
    assert isinstance(source, MapSource)
    problems: list[SampleError] = []
    for id in range(min(ATTEMPTS, len(source))):
        try:
            with preserved([*global_generators(), *find_generators(source.dataset)]):
                record, _ = record_sample(source.dataset, id)
        except Exception as error:
            problem = sample_error(error, source, id, "fetching")
            problem.__cause__ = None if problem is error else error
            problems.append(problem)
            continue
        if not files_of(record):
            raise _nothing(source.dataset, id)
        return FirstLook(id, record, record, Split(Compose([]), steps, ()))
    raise problems[0]


def _nothing(dataset: Any, id: int) -> InputError:
    name = type(dataset).__name__
    found = [advice for call, advice in _NATIVE.items() if call in _names(dataset)]
    cure = "; ".join(found) if found else "pass data to the library that opens the file natively"
    return InputError(
        f"form='reads' caches what a data set reads through Python's open(), and {name}[{id}] read no regular file of "
        f"up to 64 MiB with it: use data = open(path, 'rb').read(), and {cure}. If its samples do not come from files, "
        "it gains nothing from a cache"
    )


def _names(dataset: Any) -> set[str]:
    """The names that the methods of a data set use, and the functions of the user's that they call."""
    names: set[str] = set()
    for cls in type(dataset).__mro__:
        if is_library(cls):
            continue
        for function in class_functions(cls):
            names |= code_names(function.__code__)
            for used in used_globals(function).values():
                code = getattr(used, "__code__", None)
                if code is not None and not is_library(used):
                    names |= code_names(code)
    return names
