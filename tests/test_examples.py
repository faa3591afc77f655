"""Every example runs, says something, and leaves nothing behind."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from warm import Ended, Interpreter

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SEARCHES = {"ray_tune": ("ray",), "optuna": ("optuna",)}
PEERS = SEARCHES | {
    "accelerate_loop": ("accelerate",), "hf_datasets": ("datasets",), "hf_trainer": ("transformers", "accelerate"),
    "lightning_module": ("lightning.pytorch",), "monai_dictionaries": ("monai",),
    "torchvision_folder": ("torchvision",),
}  # fmt: skip
"""What an example needs beyond stallfree."""
ARGUMENTS = {"demo": ("--pictures", "64", "--epochs", "2", "--batch-size", "16", "--bandwidth", "1GB/s")}
"""What makes an example small."""
PRINTED = {"own_tier": "64 reads of the data set; 51 of 72 hits came from the files\n"}  # the same each time
LONG = {*PEERS, "analyze", "clara_config", "ddp", "demo", "elastic", "importance", "process_prefetcher"}
"""Examples that take a while."""


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem not in LONG], ids=lambda path: path.stem)
def test_example(path: Path, store_root: Path, interpreter: Interpreter) -> None:
    check(path.stem, interpreter.run(path, *ARGUMENTS.get(path.stem, ())), store_root)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_as_users_start_it(path: Path, store_root: Path) -> None:
    for package in PEERS.get(path.stem, ()):  # torchvision may be made for another torch
        tried = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"{package} is not there ({tried.stderr.strip().splitlines()[-1]})")
    # Short paths, since those of sockets have 107 bytes at most; and nothing need go to the user's home.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
        ray = {"RAY_TMPDIR": short, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        hub = {"HF_HOME": f"{short}/hub", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error::ResourceWarning"}
        temporary = Path(short, "t")
        temporary.mkdir()
        done = subprocess.run(
            [sys.executable, str(path), *ARGUMENTS.get(path.stem, ())],
            cwd=temporary, env=os.environ | ray | hub | {"TMPDIR": str(temporary)}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        check(path.stem, Ended(done.returncode, done.stdout, done.stderr, os.listdir(temporary)), store_root)
    if path.stem in SEARCHES:
        check_search(done.stdout)


def check(name: str, ended: Ended, store_root: Path) -> None:
    assert ended.code == 0, f"{name} failed:\n{ended.out}\n{ended.err}"
    assert PRINTED.get(name, ended.out) == ended.out != "", f"{name} prints nothing"
    assert "Traceback" not in ended.err, ended.err
    assert not list(store_root.iterdir()), f"{name} left a cache behind"
    assert all(entry.startswith("torchinductor_") for entry in ended.files), f"{name} left files behind"


def check_search(printed: str) -> None:
    """Trials were ended early, all others had every epoch, and together they decoded less often than they trained."""
    trials, early = map(int, re.findall(r"(\d+) trials, (\d+) of them ended early", printed)[0])
    epochs, decodes = re.findall(r"trained for (\d+) epochs.* decoded ([\d.]+) times", printed)[0]
    assert trials == 8
    assert 1 <= early < trials, printed
    assert int(epochs) >= 9 * (trials - early), printed
    assert 1 <= float(decodes) < int(epochs), printed
