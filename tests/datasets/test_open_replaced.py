"""Where the opens of a data set are served from a cache, the program's own `open` stays what it was."""

from __future__ import annotations

from warm import Interpreter

PROGRAM = """
import builtins, inspect, io, os, pickle, typing
import stallfree as sf

class Files:
    def __len__(self):
        return 4

    def __getitem__(self, id):
        with open(f"{{id}}.txt") as file:
            return int(file.read())

class Holder:
    def __init__(self):
        self.open, self.stat = open, os.stat

captured = Holder()
real = [open, os.stat]
for id in range(4):
    with open(f"{{id}}.txt", "w") as file:
        file.write(str(id))
with sf.CachedDataset(Files(), capacity="1MiB", form="files") as data:
    for _ in range(2):
        assert [int(number) for batch in sf.DataLoader(data, 2) for number in batch] == [0, 1, 2, 3]
for name, check in {checks}.items():
    assert eval(check), name
"""
CHECKS = {
    "what captured it can be pickled": "pickle.loads(pickle.dumps(captured)).open is open",
    "what captured stat can be pickled": "pickle.loads(pickle.dumps(captured)).stat is os.stat",
    "it is a routine": "inspect.isroutine(open) and inspect.isroutine(io.open) and inspect.isroutine(os.stat)",
    "it has no type hints": "typing.get_type_hints(open) == typing.get_type_hints(io.open) == {}",
    "it is the real one": "open is builtins.open is io.open is real[0] and os.stat is real[1]",
}


def test_open_stays_what_it_was(interpreter: Interpreter) -> None:
    ended = interpreter.run(PROGRAM.format(checks=CHECKS))
    assert ended.code == 0, ended.err
