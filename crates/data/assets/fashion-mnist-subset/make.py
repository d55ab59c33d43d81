"""Writes the embedded subset from the four files of Fashion-MNIST (Python's standard library only).

usage: python3 make.py DIR_WITH_THE_FOUR_GZ_FILES

Keeps the first TRAIN_PER_CLASS images of each class of the training files and the first
TEST_PER_CLASS of each class of the test files, in the order of the original files.
The output does not depend on time or platform, but on zlib's version.
"""
import gzip
import struct
import sys
from pathlib import Path

TRAIN_PER_CLASS = 1000
TEST_PER_CLASS = 250
HERE = Path(__file__).resolve().parent


def read_idx(path, magic, dims):
    data = gzip.decompress(path.read_bytes())
    head = struct.unpack(f">I{dims}I", data[: 4 + 4 * dims])
    assert head[0] == magic, f"{path}: magic {head[0]:#010x}"
    return head[1:], data[4 + 4 * dims :]


def write_gz(path, data):
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))
    print(f"{path.name}: {path.stat().st_size} bytes")


def subset(source, stem, per_class):
    (count, height, width), images = read_idx(source / f"{stem}-images-idx3-ubyte.gz", 0x803, 3)
    _, labels = read_idx(source / f"{stem}-labels-idx1-ubyte.gz", 0x801, 1)
    size = height * width
    taken = [0] * 10
    kept = []
    for i in range(count):
        if taken[labels[i]] < per_class:
            taken[labels[i]] += 1
            kept.append(i)
    pixels = b"".join(images[i * size : (i + 1) * size] for i in kept)
    head = struct.pack(">4I", 0x803, len(kept), height, width)
    write_gz(HERE / f"{stem}-images-idx3-ubyte.gz", head + pixels)
    head = struct.pack(">2I", 0x801, len(kept))
    write_gz(HERE / f"{stem}-labels-idx1-ubyte.gz", head + bytes(labels[i] for i in kept))


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    subset(directory, "train", TRAIN_PER_CLASS)
    subset(directory, "t10k", TEST_PER_CLASS)
