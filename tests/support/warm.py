"""An interpreter that has imported stallfree, for programs that need not do so anew.

A program runs in a fork of it, with `__main__` to itself, and ends as every interpreter ends. It knows nothing of the
tests' own process, and has another hash seed. As a program, this file is that interpreter.
"""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """What came of a program: its exit code, or minus the signal that ended it, and what it printed.

    `files` are the names of what it left in its working folder, where its temporary files go too.
    """

    code: int
    out: str
    err: str
    files: list[str]


class Interpreter:
    """The interpreter, with the empty folder in which each program is given one of its own. Warnings of resources that
    were not closed are errors.
    """

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONWARNINGS": "error::ResourceWarning"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def run(self, program: str | Path, *arguments: str) -> Ended:
        """Run a program, given as its text or its file, to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        file, text = (str(program), program.read_text()) if isinstance(program, Path) else ("program.py", program)
        print(json.dumps([text, file, *arguments]), file=self._process.stdin, flush=True)
        return Ended(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        with self._process:
            pass


def serve(folder: Path) -> tuple[Any, dict[str, Any]] | None:
    """Fork for each program, and tell what came of it. Comes back in each fork with its code and its namespace."""
    import stallfree.analysis, stallfree.clara, stallfree.cli, stallfree.shared  # noqa: E401, I001  # take long
    import stallfree.cache.tier
    import torch._dynamo  # noqa: F401  # as the first optimizer does

    stallfree.cache.tier._DRAIN_SECONDS = 60.0  # whatever is in a queue is waited for, on a busy machine either

    multiprocessing.set_start_method("fork")  # a program has no file that the processes of others could import
    gc.collect()
    gc.freeze()  # or each program would look at all of it again at its end
    for number, line in enumerate(sys.stdin):
        text, file, *arguments = json.loads(line)
        own = folder / str(number)
        own.mkdir()
        out, err = (folder / f"{number}.{kind}" for kind in ("out", "err"))
        pid = os.fork()
        if pid == 0:
            for place, path in enumerate((os.devnull, out, err)):
                opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                os.dup2(opened, place)
                os.close(opened)
            os.chdir(own)
            os.environ["TMPDIR"] = str(own)
            sys.argv[:] = [file, *arguments]
            sys.path[0] = str(Path(file).absolute().parent)
            names = {"__name__": "__main__", "__file__": file, "__spec__": None, "__builtins__": __builtins__}
            return compile(text, file, "exec", dont_inherit=True), names
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([code, out.read_text(), err.read_text(), sorted(os.listdir(own))]), flush=True)
    return None


def become(code: Any, names: dict[str, Any]) -> None:
    """Go on as another program, in the namespace of `__main__`."""
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(names)
    exec(code, namespace)


if __name__ == "__main__" and (given := serve(Path(sys.argv[1]))):
    become(*given)
