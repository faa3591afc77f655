"""Runs a script as `python` does, with its data loaders timed from outside.

`stallfree run` replaces itself with a new interpreter that runs this file as a program. Before the script starts, this
file imports only modules that every interpreter has loaded: the script finds its own modules, and decides when to
import torch.

    start.py JSON KIND TARGET [ARGUMENT ...]      JSON: a path, or empty; KIND: "script" or "module"
"""

from __future__ import annotations

import atexit
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

USER_ERROR = 2


def main() -> None:
    """Run the script or module in the arguments as `__main__`; the summary is printed at interpreter exit."""
    bare = {name: value for name, value in globals().items() if name[:2] == "__"}  # as python sets them in a script
    out, kind, target, *rest = sys.argv[1:]
    own_path = not getattr(sys.flags, "safe_path", False)
    if own_path:
        del sys.path[0]  # the folder of this file
    watch = _beside("loops").Watch(target, out, _beside("summary"))
    atexit.register(watch.finish)
    module = type(sys)("__main__")
    names = module.__dict__
    names.clear()
    names.update(bare, __doc__=None)
    if "__annotations__" in bare:
        names["__annotations__"] = {}
    sys.modules["__main__"] = module
    try:
        code = (_script if kind == "script" else _module)(target, rest, module, own_path)
        exec(code, names)
        watch.measure()
    except SystemExit as end:
        watch.failed = bool(end.code)
        if not watch.failed:
            watch.measure()
        raise
    except BaseException as error:
        watch.failed = True
        _hide_these_frames(error)
        raise


def _beside(name: str) -> Any:
    """The module `name` in this folder, without an entry in `sys.modules`."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    module = type(sys)(f"stallfree.observe.{name}")
    code = type(__loader__)(module.__name__, path).get_code(module.__name__)  # type: ignore[name-defined]
    exec(code, module.__dict__)
    return module


def _script(path: str, rest: list[str], module: ModuleType, own_path: bool) -> CodeType:
    """Do what `python PATH` does before the first line of the script."""
    sys.argv = [path, *rest]
    if own_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    module.__dict__.update(
        __file__=path,
        __cached__=None,
        __loader__=type(__loader__)("__main__", path),  # type: ignore[name-defined]
    )
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _module(name: str, rest: list[str], module: ModuleType, own_path: bool) -> CodeType:
    """Do what `python -m NAME` does before the first line of the module."""
    sys.argv = ["-m", *rest]
    if own_path:
        sys.path.insert(0, os.getcwd())
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an import of the parent package failed
        spec = None
    code: CodeType | None = None
    if spec is not None and spec.loader is not None:
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if spec is None or code is None:
        print(
            f"error: there is no module {name!r} to run: give the name that you would give to `python -m`",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(USER_ERROR)
    sys.argv[0] = spec.origin or name
    module.__dict__.update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec
    )
    return code


def _hide_these_frames(error: BaseException) -> None:
    """Remove the frames of this file from the traceback of `error`."""
    hook, inner = sys.excepthook, error.__traceback__
    while inner is not None and inner.tb_frame.f_globals is globals():
        inner = inner.tb_next

    def show(kind: type[BaseException], value: BaseException, _: object) -> None:
        sys.excepthook = hook
        hook(kind, value.with_traceback(inner), inner)

    sys.excepthook = show


if __name__ == "__main__":
    main()
