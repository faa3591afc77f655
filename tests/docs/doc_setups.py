"""What stands around the blocks of a page when they are run: small data in place of the reader's, smaller numbers."""

import json
import re

from doc_tools import ROOT, blocks

_SMALLER = {
    r"num_workers=\d+": "num_workers=1", r'"\d+GiB"': '"8MiB"', r"range\((5|90|160|500|600)\)": "range(2)",
    r"range\([24]00\)": "range(32)", r"epochs=[34]": "epochs=2", r"batch_size=(64|256)": "batch_size=8",
    r"/data/pictures": "pictures", r"/data/list": "list", r'"/data"': '"."',
}  # fmt: skip
"""Patterns in the blocks, and what is run in their place, so that a page takes a second at most."""


def shrink(code: str) -> str:
    for pattern, shorter in _SMALLER.items():
        code = re.sub(pattern, shorter, code)
    return code


_BASE = """
import contextlib, os, random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np, pytest, torch
from PIL import Image
from torch import nn
from torch.nn import functional
import stallfree as sf
for number in range(16):
    folder = Path("pictures", "ab"[number % 2])
    folder.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((24, 24), 40).convert("RGB").save(folder / f"{number}.jpg")
def resize(picture): return np.asarray(Image.fromarray(picture).resize((16, 16)))
def flip(picture): return picture[:, ::-1].copy() if random.random() < 0.5 else picture
def to_tensor(picture): return torch.from_numpy(picture.copy()).permute(2, 0, 1).float() / 255
def train(*batch): pass
def step(batch): pass
def load(key): return np.zeros(8)
device = "cpu"
image = picture = np.zeros((24, 24, 3), np.uint8)
transform = sf.Compose([resize, flip, to_tensor])
data = dataset = sf.ImageFolder("pictures", transform=transform)
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss(reduction="none")
"""

EXAMPLES = _BASE + "loader = sf.DataLoader(dataset, batch_size=4)\n"
"""What the examples in docstrings use; `docs/reference/index.md` says so to readers."""

WORLD = f"""{_BASE}
from torch.optim.lr_scheduler import LambdaLR
augment = crop = random_crop = flip
shrink = resize
cached = sf.CachedDataset(data, capacity="8MiB", seed=7)
loader = sf.DataLoader(cached, batch_size=8)
torch_loader = torch.utils.data.DataLoader(data, batch_size=8)
for batch in loader: pass
"""

_VOLUMES = """
class Volumes:
    def __len__(self): return 24
    def __getitem__(self, id): return np.full((4, 4, 4), id, np.float32)
def shake(volume): return torch.from_numpy(volume) + torch.rand(1)
volumes, transform = Volumes(), sf.Compose([sf.mark_random(shake)])
"""

_SHARDS = """
import io, tarfile
os.environ["XDG_CACHE_HOME"] = os.getcwd()
for shard in range(2):
    with tarfile.open(f"train-{shard:03}.tar", "w") as tar:
        for end, held in (("jpg", Path("pictures/a/0.jpg").read_bytes()), ("cls", b"3")):
            member = tarfile.TarInfo(f"{shard}.{end}")
            member.size = len(held)
            tar.addfile(member, io.BytesIO(held))
"""

_TRAIN = json.loads(blocks(ROOT / "docs" / "clara.md", "json")[0].text)["train"]
_CONFIGURATION = json.dumps({"train": _TRAIN, "validate": _TRAIN}).replace("96", "8").replace("48", "4")
_CLARA = f"""
import json
from pathlib import Path
import nibabel, numpy as np, torch
import stallfree as sf
Path("train_config.json").write_text({_CONFIGURATION!r})
files = []
for number in range(4):
    files.append({{part: f"{{part}}-{{number}}.nii.gz" for part in ("image", "label")}})
    for name in files[-1].values():
        nibabel.save(nibabel.Nifti1Image(np.zeros((9, 9, 9), np.int16), np.eye(4)), name)
Path("list.json").write_text(json.dumps({{"training": files, "validation": []}}))
def step(*batch): pass
"""


WORLDS = {
    "docs/tutorial.md": "", "examples/tutorial.ipynb": "", "docs/clara.md": _CLARA,
    "docs/howto/volumes.md": WORLD + _VOLUMES,
    "docs/howto/migrate.md": WORLD + _VOLUMES + _SHARDS + "files = volumes\n",
    "docs/howto/integrations.md": f"""{WORLD}{_SHARDS}
import fsspec
plain = [(np.zeros(4), id) for id in range(16)]
for name in "ab": fsspec.filesystem("memory").pipe(f"/{{name}}.jpg", Path("pictures/a/0.jpg").read_bytes())
Path("frames.raw").write_bytes(bytes(1024))
def decode(frame): return np.frombuffer(frame, np.uint8).copy()
""",
}  # fmt: skip
"""What is run before the first block of a page; one that is not here has `WORLD`."""

_REPORT = """
import sys
sys.path.insert(0, {folder!r})
from report_examples import make
make({{"G": 900, "P": 500, "P_hit": 800, "S": 100, "C": 9000, "cold": 100, "warm": 450}}).save("report.json")
""".format(folder=str(ROOT / "tests" / "support"))

EXAMPLES_BEFORE = {
    **dict.fromkeys(["Report", "Report.load", "Report.predict", "Prediction"], _REPORT),
    **dict.fromkeys(["clara.load", "clara.Pipeline", "clara.Pipelines"], _CLARA),
    "TarDataset": _SHARDS,
    "cut": """
class Images:
    def __init__(self):
        self.files, self.transform = sorted(Path("pictures").glob("*/*.jpg")), dataset.pipeline.transforms[1].transform
    def __len__(self): return len(self.files)
    def __getitem__(self, id): return self.transform(np.asarray(Image.open(self.files[id]))), id % 2
images = Images()
""",
}
"""What single examples need beside that."""
