"""Digests of the contents of a run folder, part by part: a tensor file, a field of an event over a run.

Not digested, because they are no results:
- times, speeds, sizes of memory, counts of copies and waits, versions of the program and its files,
  paths, and the number of lost events;
- repeated settings: most of `run_started` and of `summary.json`, all of `config.toml`, and the
  `identity` in a checkpoint (including its dataset, which the weights' metadata has, too);
- a checkpoint's position in `events.jsonl`, and its checksum, which follows from the other parts.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Part of a result -> its digest.
Parts = dict[str, str]

# Keys that are left out at every level: see the head of this file.
NO_RESULT = {
    *("v", "version", "program_version", "seq", "crc32", "seconds", "step_seconds", "step_seconds_total"),
    *("wall_seconds", "phases", "images_per_s", "images_per_second"),
    *("identity", "events", "hot"),
}
# Names of keys in older builds -> the names now.
RENAMED = {"validation": "counterfactual_cost"}
# Fields with results in records that mostly repeat settings.
RUN_STARTED = ["train_samples", "control_samples", "test_samples", "host_parameters", "batches"]
# Events whose order is digested, so that a new kind between them is no difference.
ORDERED = {
    *("run_started", "round_started", "batch_completed", "step_completed", "counterfactuals"),
    *("module_germinated", "stage_changed", "gate_evaluated", "module_pruned", "module_fossilized"),
    *("checkpoint_written", "policy_updated", "governor_rollback", "anomaly", "episode_ended"),
    "run_ended",
}
# Metadata of a tensor file that is of the file, and not of its contents.
OF_FILE = ("format", "crc32", "meristem_format")
SUMMARY = ["status", "training_steps", "images", "rollbacks", "envs", "round_results"]
SUMMARY += ["counterfactual_cost"]


def digest(value: Any) -> str:
    """Digest of bytes, or of a value of JSON or CBOR: floats to the last bit, keys in order."""
    plain = isinstance(value, bytes)
    data = value if plain else json.dumps(value, sort_keys=True, default=bytes.hex).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def fields(prefix: str, records: list[Any]) -> Parts:
    """A digest for each field of records, nested ones included, over all of them in order."""
    values: dict[str, list[Any]] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value.keys() - NO_RESULT:
                visit(f"{path}.{RENAMED.get(key, key)}", value[key])
        elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
            values.setdefault(f"{path}.count", []).append(len(value))
            for entry in value:
                visit(path, entry)
        else:
            values.setdefault(path, []).append(value)

    for record in records:
        visit(prefix, record)
    return {path: digest(entries) for path, entries in values.items()}


def tensors(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Tensors of a safetensors file as bytes, by name with type and shape, and its metadata."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in sorted(header.items()):
        begin, end = (start + offset for offset in entry["data_offsets"])
        found[f"{name} {entry['dtype']} {entry['shape']}"] = data[begin:end]
    return found, metadata


def group(named: dict[str, bytes]) -> bytes:
    return b"".join(name.encode() + b"=" + data for name, data in sorted(named.items()))


class Cbor:
    """Reader of the subset of CBOR in checkpoints."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def entries(self, count: int | None) -> Iterator[None]:
        """Yields once per entry of a list or map; without a count the entries end with a break."""
        while count is None or count > 0:
            if count is None and self.data[self.at] == 0xFF:
                self.at += 1
                return
            yield
            count = None if count is None else count - 1

    def value(self) -> Any:
        kind, small = divmod(self.take(1)[0], 32)
        if kind == 7:
            constants = {20: False, 21: True, 22: None}
            if small in constants:
                return constants[small]
            size, form = {25: (2, ">e"), 26: (4, ">f"), 27: (8, ">d")}[small]
            return struct.unpack(form, self.take(size))[0]
        count = small if small < 24 else None
        if 24 <= small < 28:
            count = int.from_bytes(self.take(1 << (small - 24)), "big")
        if kind == 4:
            return [self.value() for _ in self.entries(count)]
        if kind == 5:
            return {str(self.value()): self.value() for _ in self.entries(count)}
        if count is None or kind == 6:
            raise ValueError(f"byte {self.at}: CBOR that no checkpoint has")
        if kind in (0, 1):
            return count if kind == 0 else -1 - count
        return self.take(count) if kind == 2 else self.take(count).decode()


def metadata_parts(prefix: str, metadata: dict[str, str]) -> Parts:
    return {f"{prefix}.{key}": digest(text) for key, text in metadata.items() if key not in OF_FILE}


def weights_parts(folder: Path) -> Parts:
    parts: Parts = {}
    for path in sorted(folder.glob("weights/*.safetensors")):
        named, metadata = tensors(path)
        parts[path.stem] = digest(group(named))
        parts |= metadata_parts(path.stem, metadata)
    return parts


def event_parts(folder: Path) -> Parts:
    lines = (folder / "events.jsonl").read_text().splitlines()
    by_name: dict[str, list[Any]] = {}
    order = []
    for line in lines:
        event = json.loads(line)
        name = event.pop("event")
        if name == "run_started":
            event = {key: event[key] for key in RUN_STARTED}
        by_name.setdefault(name, []).append(event)
        if name in ORDERED:
            order.append([name, event.get("env"), event.get("step")])
    parts = {"order": digest(order)}
    for name, events in by_name.items():
        parts |= fields(name, events)
    return parts


def tensor_kind(name: str) -> str:
    """Groups the tensors of a checkpoint, so that all envs, and all ranks, share a part."""
    words = name.split(" ")[0].split(".")
    if words[0] == "env":
        return f"env.{words[2]}"
    if words[1] == "rank":
        del words[1:3]
    return ".".join(words if words[1] == "rollout" else words[:2])


def checkpoint_parts(folder: Path) -> Parts:
    """Parts of all checkpoints that a run keeps, over the checkpoints in the order of their names."""
    groups: dict[str, list[Any]] = {}
    progress, memories = [], []
    paths = sorted(folder.glob("checkpoints/*.safetensors"))
    for path in paths:
        named, _ = tensors(path)
        inner = {name.split(" ")[0]: named.pop(name) for name in list(named) if "." not in name}
        progress.append(Cbor(inner["progress"]).value())
        # A controller without memory has no bytes. The memories of ranks are byte strings in a list.
        memory = Cbor(inner["controller_memory"]).value() if inner["controller_memory"] else None
        if any(name.startswith("controller.rank.") for name in named):
            memory = [Cbor(bytes(rank)).value() for rank in memory]
        memories.append(memory)
        steps: dict[str, set[str]] = {}
        for name, data in named.items():
            kind = tensor_kind(name)
            # Older builds counted the steps of a group of parameters, and not of each.
            if kind.startswith("controller") and name.split(" ")[0].endswith(".step"):
                steps.setdefault(f"{kind}.steps", set()).add(digest(data))
            else:
                groups.setdefault(kind, []).append([name, digest(data)])
        for kind, values in steps.items():
            groups.setdefault(kind, []).append(sorted(values))
    parts = {kind: digest(entries) for kind, entries in groups.items()}
    parts |= fields("progress", progress) | fields("controller.memory", memories)
    return parts | {"names": digest([path.name for path in paths])}


def policy_parts(folder: Path) -> Parts:
    path = folder / "policy.safetensors"
    if not path.exists():
        return {}
    named, metadata = tensors(path)
    return {"tensors": digest(group(named))} | metadata_parts("metadata", metadata)


def summary_parts(folder: Path) -> Parts:
    summary = json.loads((folder / "summary.json").read_text())
    summary = {RENAMED.get(key, key): value for key, value in summary.items()}
    return fields("summary", [{key: summary[key] for key in SUMMARY}])


def output_parts(text: str) -> Parts:
    """What a command prints as JSON."""
    return fields("output", [json.loads(text)])


def folder_parts(folder: Path) -> dict[str, Parts]:
    """All columns of a run folder."""
    return {
        "weights": weights_parts(folder),
        "events": event_parts(folder),
        "checkpoint": checkpoint_parts(folder),
        "policy": policy_parts(folder),
        "summary": summary_parts(folder),
    }
