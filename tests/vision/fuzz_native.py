"""Damaged pictures for the compiled part: `python fuzz_native.py LIBRARY COUNT SEED`. Ends well, or not at all.

Bits are flipped, bytes removed, put in and cut off; parts and sizes are drawn, also such as no picture has. Behind each
result lie bytes that must stay. Needs NumPy and Pillow only, so that it also runs under sanitizers and
without torch.
"""

import ctypes
import io
import random
import sys

import numpy as np
from PIL import Image

GUARD = 64
PROBLEMS = {0: "done", 1: "unreadable", 2: "no memory", 3: "bad argument"}


def pictures() -> list[bytes]:
    y, x = np.mgrid[0:90, 0:131]
    noise = np.random.default_rng(1).integers(0, 60, (90, 131, 3))
    image = Image.fromarray((np.stack([x * 1.5, y * 2, x + y], -1) + noise).clip(0, 255).astype(np.uint8))
    made = []
    for mode in ("RGB", "L", "CMYK"):
        for options in ({}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"restart_marker_rows": 1}):
            file = io.BytesIO()
            image.convert(mode).save(file, "JPEG", quality=80, **options)
            made.append(file.getvalue())
    return made


def damaged(data: bytes, draw: random.Random) -> bytes:
    """`data` with a few faults, nearly always: bytes that are changed, removed, put in or cut off."""
    out = bytearray(data)
    for _ in range(draw.choice((0, 1, 1, 2, 5, 30))):
        # Half of the faults in the headers, where sizes and tables are.
        at = draw.randrange(min(len(out), 700) if draw.random() < 0.5 else len(out))
        end = draw.choice((at, at + 1, at + 1, at + draw.randrange(1, 40), len(out) if draw.random() < 0.3 else at + 1))
        new = draw.choice((b"", b"\0", b"\xff", draw.randbytes(1), draw.randbytes(draw.randrange(1, 40))))
        out[at:end] = bytes([out[at] ^ 1 << draw.randrange(8)]) if end == at + 1 and draw.random() < 0.5 else new
        if len(out) < 4:
            break
    return bytes(out)


def main() -> None:
    library, count, draw = ctypes.CDLL(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    number, size = ctypes.c_int, ctypes.c_size_t
    library.stallfree_jpeg_size.argtypes = [ctypes.c_char_p, size, ctypes.c_void_p]
    library.stallfree_decode.argtypes = [ctypes.c_char_p, size, *[number] * 8, ctypes.c_void_p]
    found: dict[str, int] = {}
    whole = pictures()
    for _ in range(count):
        data = damaged(draw.choice(whole), draw)
        sides = (number * 2)()
        if library.stallfree_jpeg_size(data, len(data), sides):
            sides[0], sides[1] = 90, 131
        crop = _part(sides[0]), _part(sides[1])
        height, width = draw.choice((1, 7, 40, 200)), draw.choice((1, 9, 33, 150))
        flags = draw.randrange(2), draw.randrange(2)
        arguments = crop[0][0], crop[1][0], crop[0][1], crop[1][1], height, width, *flags
        out = np.full(height * width * 3 + GUARD, 123, np.uint8)
        problem = library.stallfree_decode(data, len(data), *arguments, out.ctypes.data)
        if not (out[-GUARD:] == 123).all():
            raise AssertionError(f"written beyond the end with {arguments}")
        found[PROBLEMS[problem]] = found.get(PROBLEMS[problem], 0) + 1
    print(found)


def _part(side: int) -> tuple[int, int]:
    """Where a part begins and how long it is; one in ten does not lie within `side`."""
    if random.random() < 0.1:
        return random.choice((-1, 0, side, 2**31 - 1)), random.choice((-5, 0, 1, side + 1, 65500, 2**31 - 1))
    length = random.randint(1, min(side, 4000))
    return random.randint(0, side - length), length


if __name__ == "__main__":
    random.seed(sys.argv[3])
    main()
