"""Writes `docs/errors.md`: every message of an error that stallfree raises, taken out of its source.

    python docs/errors_table.py          # write the page
    python docs/errors_table.py --check  # exit code 1 if it is not what the source says

A message is what stands in a call of an error's class; what varies is shown as `<name>`. The part from its first
request ("give ...", "use ...") on is what to do. Where that is not in the message, it is in `ADVICE`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stallfree"
PAGE = ROOT / "docs" / "errors.md"

TOPICS = {
    "Data set and pipeline": ("errors.py", "sources/", "pipeline/", "vision/"),
    "Cache": (
        "cache/",
        "ipc/folders.py",
        "ipc/owned.py",
        "ipc/locks.py",
        "ipc/shared_counts.py",
        "units.py",
        "platform.py",
        "stores/disk_tier.py",
        "datasets/",
        "sampling/window",
        "sampling/plans/window.py",
    ),
    "Importance": (
        "sampling/plans/",
        "loader/benefit.py",
        "sampling/importance_source.py",
        "sampling/packager.py",
    ),
    "Several nodes": ("stores/", "sampling/ranks.py"),
    "Loader": ("loader/", "autotune/", "sampling/", "workers/", "batches/", "ipc/"),
    "Shared loader": ("shared/",),
    "Device": ("device/",),
    "Analysis and command line": ("analysis/", "cli/", "observe/", "report/", "events.py", "integrations/"),
    "Configurations of Clara": ("clara/",),
}
"""Where messages come from, by the beginning of the path in the package; the first that fits counts."""

WHEN = {
    "analysis/analyzer.py": "A job is analysed",
    "analysis/job.py": "A job is analysed",
    "analysis/model.py": "A report predicts",
    "analysis/replay.py": "A trace is replayed",
    "analysis/report.py": "A report is read, or predicts",
    "analysis/simulate.py": "A simulation starts",
    "cache/memory/admin.py": "`stallfree cache` removes a cache",
    "cache/checks.py": "A cache is made or used",
    "cache/memory/index.py": "A cache is made",
    "cache/memory/layout.py": "A cache is made",
    "cache/memory/limits.py": "A cache is made",
    "cache/packages.py": "Packages are used",
    "cache/policies.py": "A cache is made",
    "cache/memory/sample_cache.py": "A cache is made or used",
    "cache/memory/writer.py": "A cache is made or used",
    "clara/arguments.py": "The configuration is read",
    "clara/augment.py": "A transform is made or runs",
    "clara/configuration.py": "The configuration is read",
    "clara/data_list.py": "The data list is read",
    "clara/fields.py": "A transform is made or runs",
    "clara/nifti.py": "A volume is read",
    "clara/pipelines.py": "The configuration is read, or a sample is prepared",
    "clara/registry.py": "The configuration is read",
    "clara/transforms.py": "A transform is made or runs",
    "cli/_output.py": "A command writes a file",
    "cli/cache.py": "`stallfree cache` runs",
    "cli/replay.py": "`stallfree replay` runs",
    "cli/run.py": "`stallfree run` starts",
    "cli/simulate.py": "`stallfree simulate` runs",
    "cli/top.py": "`stallfree top` starts",
    "device/ahead.py": "A `DevicePrefetcher` is iterated",
    "device/backend.py": "A prefetcher is made",
    "device/consumer.py": "A `ProcessPrefetcher` is iterated",
    "device/consumer_server.py": "A `ProcessPrefetcher` is iterated",
    "device/protocol.py": "A `ProcessPrefetcher` is iterated",
    "device/prefetcher.py": "A `DevicePrefetcher` is made or iterated",
    "device/process.py": "A `ProcessPrefetcher` is made",
    "device/slots.py": "A `ProcessPrefetcher` is iterated",
    "errors.py": "Something is used whose package is an extra",
    "events.py": "A log of events is read",
    "ipc/folders.py": "A cache is made, or a process attaches to it",
    "integrations/accelerate.py": "A loader is prepared by accelerate",
    "integrations/lightning.py": "Training with Lightning starts",
    "ipc/consumers.py": "A `SharedLoader` or a `ProcessPrefetcher` is iterated",
    "ipc/process.py": "A loader starts a process",
    "loader/arguments.py": "A `DataLoader` is made",
    "autotune/auto_cache.py": "A `DataLoader` is made with `cache`",
    "autotune/stream_cache.py": "A `DataLoader` is made with `cache`",
    "loader/benefit.py": "`measure_benefit` is called",
    "datasets/cache_loader.py": "A `CacheLoader` is used",
    "datasets/cached_dataset.py": "A `CachedDataset` is made or used",
    "loader/dataloader.py": "A `DataLoader` is made, or its state is loaded",
    "loader/epoch.py": "A `DataLoader` is iterated",
    "loader/epoch_runner.py": "The state of a `DataLoader` is loaded",
    "workers/event_log.py": "A `DataLoader` is iterated",
    "batches/batch_builder.py": "A `DataLoader` is iterated",
    "batches/stream.py": "A `DataLoader` is made with an `IterableDataset`",
    "datasets/dataset_probe.py": "A cache is made, and its first samples are read",
    "sampling/importance_source.py": "A `DataLoader` is made with an `ImportanceSampler`, or its state is loaded",
    "workers/ray_group.py": "A `SharedLoader` with Ray workers is iterated",
    "workers/ray_pool.py": "A `DataLoader` with Ray workers is iterated",
    "workers/ray_executor.py": "A `DataLoader` with Ray workers is iterated",
    "workers/ray_workers.py": "`RayWorkers` is made",
    "workers/worker_processes.py": "A `DataLoader` is iterated",
    "datasets/local_sampler.py": "A `LocalSampler` is made",
    "sampling/order.py": "A `DataLoader` is iterated",
    "loader/output.py": "A `DataLoader` is made or iterated",
    "sampling/packager.py": "Packages are made",
    "sampling/stream_order.py": "The state of a loader of an `IterableDataset` is loaded",
    "datasets/private_names.py": "A cache is made for a data set that has no fingerprint",
    "loader/progress.py": "The state of a `DataLoader` is taken",
    "sampling/ranks.py": "A job of several ranks starts",
    "ipc/shared_counts.py": "A cache is made",
    "datasets/reads_probe.py": 'A `CachedDataset` with `form="reads"` is made',
    "datasets/smart_cache.py": "A `SmartCacheDataset` is made or used",
    "sampling/window_size.py": "A `SmartCacheDataset` is made",
    "sampling/window_source.py": "A `SmartCacheDataset` is made or used",
    "ipc/locks.py": "A cache or a group is used",
    "observe/metrics.py": "Metrics are made",
    "ipc/owned.py": "A cache is made, or a process attaches to it",
    "pipeline/compose.py": "A pipeline is made or runs",
    "pipeline/fingerprint.py": "A cache is made",
    "pipeline/marks.py": "A transform is marked",
    "pipeline/protocol.py": "A sample is fetched or prepared",
    "sampling/plans/benefit.py": "A benefit is computed",
    "sampling/plans/probabilities.py": "An `ImportanceSampler` is made",
    "sampling/plans/importance.py": "An `ImportanceSampler` is made or used",
    "sampling/plans/jobs.py": "Several jobs share a cache by importance",
    "sampling/plans/losses.py": "Losses are handed in",
    "sampling/plans/schedule.py": "A `BySamples` is made or used",
    "sampling/plans/states.py": "A state is loaded",
    "sampling/plans/window.py": "A `SmartCacheDataset` is made",
    "platform.py": "Something is used that needs Linux",
    "report/document.py": "A page is written",
    "report/figures.py": "Figures are read",
    "report/simulation.py": "A page is written",
    "shared/group.py": "A `SharedLoader` is made",
    "shared/member.py": "A `SharedLoader` is iterated",
    "shared/rebatching.py": "A `SharedLoader` is iterated",
    "shared/shared_loader.py": "A `SharedLoader` is made or used",
    "sources/apart.py": "A sample is fetched",
    "sources/cutting/bare.py": "A sample is fetched",
    "sources/base.py": "A data set is given",
    "sources/cutting/cut.py": "`cut` is called",
    "sources/cutting/check.py": "`cut` is called",
    "sources/decode.py": "A `DecodeImage` is made, or runs",
    "sources/files.py": "A `FileDataset` is made",
    "sources/image_folder.py": "An `ImageFolder` is made",
    "sources/mapped.py": "A data set is given",
    "sources/paths.py": "A data set of files is made",
    "sources/cutting/recorded.py": "`cut` is called, or a sample is prepared",
    "sources/cutting/stand_in.py": "`cut` is called, or a sample is fetched",
    "sources/tar.py": "A `TarDataset` is made",
    "sources/tar_index.py": "A `TarDataset` is made",
    "sources/throttle.py": "A `ThrottledSource` is made or used",
    "stores/disk_tier.py": "A `DiskTier` is made, or a cache with it",
    "stores/addresses.py": "A `RedisStore` is made",
    "stores/launch/place.py": "A `RedisStore` is made in a job of several nodes",
    "stores/launch/rendezvous.py": "A `RedisStore` is made in a job of several nodes",
    "stores/redis_tier.py": "A cache in servers is made or used",
    "stores/servers.py": "A `RedisStore` is made with `hosts`",
    "stores/launch/server.py": "A `RedisStore` is made",
    "stores/store.py": "A `RedisStore` is made, or a cache in it",
    "cache/tiers/tiered.py": "Samples are stored in a cache of several tiers",
    "units.py": "A size, a rate, a time or a number is given",
    "vision/arguments.py": "A step of `stallfree.vision` is made or runs",
    "vision/crops.py": "A step of `stallfree.vision` is made or runs",
    "vision/normalize.py": "A step of `stallfree.vision` is made or runs",
    "vision/transforms.py": "A step of `stallfree.vision` is made or runs",
}
"""When the messages of a file come."""

INSIDE = (
    "cache/packages.py",
    "cache/memory/records.py",
    "batches/ring.py",
    "pipeline/codec.py",
    "pipeline/images.py",
    "pipeline/structure.py",
    "shared/views.py",
)
"""Files whose messages need a damaged file or a fault of stallfree, or reach users only within another message."""

CLASSES = re.findall(r"^class (\w+)\(", (SOURCE / "errors.py").read_text(encoding="utf-8"), re.MULTILINE)

_VERBS = (
    "analyse|Ask|begin|call|change|check|compose|convert|correct|crop|define|decompress|end|give|install|iterate|leave"
    "|let|load|make|mend|name|number|open|pass|pip|prepare|put|ranks have|read|remove|resample|return|say|see|set|start"
    "|train|try|undo|unset|use|write"
)
_ADVICE = re.compile(
    rf"(?:: |\. |; |, so |, or (?=leave))(?=(?:{_VERBS})\b)"
    r"|(?:,|:|;) (?=expected\b|it wants\b|ids are\b|a key is\b|a share is\b|a larger\b|`apt)",
    re.IGNORECASE,
)


class Message(NamedTuple):
    """One row. `says` and `advice`, one after the other, are the message; hand-written advice is not part of it."""

    topic: str
    kind: str
    says: str
    advice: str
    when: str


@cache
def messages() -> list[Message]:
    """All of them, by topic, place and line, each once."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name in INSIDE:
            continue
        for kind, text in _errors(ast.parse(path.read_text(encoding="utf-8"))):
            topic = next(topic for topic, places in TOPICS.items() if name.startswith(places))
            says, advice = _parted(text)
            found[topic, kind, text] = Message(topic, kind, says, advice or ADVICE.get(text, ""), WHEN[name])
    return sorted(found.values(), key=lambda message: list(TOPICS).index(message.topic))


def _errors(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The class and the message of each error that is made, where its text stands there or in a variable."""
    constants = {
        node.targets[0].id.strip("_").lower(): _text(node.value)
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_plain(node.value)
    }
    for scope in ast.walk(tree):
        if isinstance(scope, (ast.FunctionDef, ast.Module)):
            own = list(_own(scope))
            texts = {node.targets[0].id: node.value for node in own if _is_text(node)}  # type: ignore[attr-defined]
            for node in own:
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                    first = node.args[0] if node.args else ast.Constant("")
                    first = texts.get(first.id, first) if isinstance(first, ast.Name) else first
                    text = re.sub(r"<(\w+)>", partial(_constant, constants), _text(first)).strip()
                    if re.sub(r"<[^<>]*>|\W", "", text):  # else it is passed on from elsewhere
                        yield node.func.id, text


def _constant(constants: dict[str, str], found: re.Match[str]) -> str:
    return constants.get(found[1], found[0])


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, (ast.FunctionDef, ast.Module)):
            yield node
            yield from _own(node)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, (ast.JoinedStr, ast.BinOp))
    )


def _text(node: ast.expr) -> str:
    """The text that an expression gives, with what varies as `<name>`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [_text(value) if isinstance(value, ast.Constant) else f"<{_name(value)}>" for value in node.values]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return f"<{_name(node)}>"


def _name(node: ast.expr) -> str:
    """A short name for what an expression gives."""
    if isinstance(node, ast.FormattedValue):
        return _name(node.value)
    if isinstance(node, ast.Name):
        return node.id.strip("_").lower()
    if isinstance(node, ast.Attribute):
        is_type = isinstance(node.value, ast.Call) and _name(node.value.func) == "type"
        return "type" if is_type else node.attr.strip("_").lower()
    if isinstance(node, ast.Subscript):
        return _name(node.slice) if isinstance(node.slice, ast.Constant) else _name(node.value)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Call):
        return _name(_given(node))
    return "names" if isinstance(node, (ast.BoolOp, ast.IfExp)) else "number"


def _given(call: ast.Call) -> ast.expr:
    """What a call is about: its first argument, the object of a method without any, else the function."""
    if call.args and not isinstance(call.args[0], (ast.GeneratorExp, ast.Starred, ast.Constant)):
        return call.args[0]
    if isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Constant):
        return call.func.value
    return ast.Name("names")


def _parted(text: str) -> tuple[str, str]:
    found = _ADVICE.search(text)
    return (text, "") if found is None else (text[: found.end()].rstrip(), text[found.end() :])


def _cell(text: str) -> str:
    for sign in "&<>|{}*[]`\\":
        text = text.replace(sign, f"&#{ord(sign)};") if sign != "&" else text.replace("&", "&amp;")
    return text.replace("__", "&#95;&#95;")


def page() -> str:
    """The page."""
    found = messages()
    lines = [INTRODUCTION]
    for topic in TOPICS:
        lines += [
            "",
            f"## {topic}",
            "",
            "| message | what to do | when it comes | class |",
            "| --- | --- | --- | --- |",
        ]
        for row in found:
            if row.topic == topic:
                lines.append(f"| {_cell(row.says)} | {_cell(row.advice)} | {row.when} | {row.kind} |")
    return "\n".join([*lines, "", END])


INTRODUCTION = """\
<!-- written by docs/errors_table.py out of the source; change it there -->

# Messages

Every error that stallfree raises on purpose, by topic. A message says what happened and with which value, and then what
to do: here in two columns, which are one text. What varies stands as <value>. The classes are in
[the reference](reference/errors.md).

Commands print the message as one line, `error: ...`, and end with exit code 2.

| class | also Python's | what has happened |
| --- | --- | --- |
| InputError | ValueError | a value that was given cannot be used: correct it |
| CapacityError | ValueError | a size cannot be used, or there is less memory than that |
| FingerprintError | ValueError | a name or a folder belongs to other data or another user |
| StorageError | OSError | a folder of a cache cannot be made, locked or read |
| CodecError | TypeError | a value cannot be stored as it is, or is no record |
| SampleError | | one sample could not be fetched or prepared: `.id` and `.where` say which; `on_error="skip"` goes on |
| WorkerError | | worker processes died again and again: `.ids` are the samples of the batch |
| WaitError | TimeoutError | a wait reached its limit |
| ProducerError | | the process of a `ProcessPrefetcher` has ended |
| MissingExtraError | ImportError | an optional package is not installed: the message has the command |
| MissingServerError | OSError | no server for a store is installed, or it does not stay alive |
| PlatformError | NotImplementedError | the operating system lacks something: use what the message names |

An error of your own code in a data set, a transform or a `collate_fn` is the cause of the one that is raised, or is
raised as it is.""".replace("<value>", "&lt;value&gt;")

END = """\
## Other errors

A message that is not here comes from Python, PyTorch or another library. One that speaks of a malformed record, a
checksum or a slot means a damaged file or a fault of stallfree: remove the cache with `stallfree cache rm NAME`, and if
it comes again, please report it with its traceback.
"""

ADVICE = {
    "<doing> sample <id><place> failed: <type>: <error>": (
        'see the cause above it, and mend the sample or the data set; or go on without it: on_error="skip"'
    ),
    "<what> has length 0: there is nothing to train on. <advice>": "give a data set of at least one sample",
    "no whole picture in these <data> bytes: <error>": "write or download the file again",
    "<root> has no folders: pictures are expected in <root>/CLASS/, one folder per class": (
        "give the folder above those of the classes"
    ),
    "<name> is an IterableDataset: samples are cached and planned by their id, so a map-style data set "
    "with __getitem__ and __len__ is needed. If it fits in memory, give list(dataset)": "give such a data set",
    "<shard>: {<first>..<last>} has no number in it, give the smaller one first": "correct the range",
    "num_ids=<num_ids>: a cache needs a data set of at least one sample": "give a data set that has samples",
    "the cache <name> has the policy <name>, which makes its own scores: set_scores is for a cache made "
    "with policy='importance' or 'oracle'": "make the cache with one of these",
    "the value of the key <key> cannot be stored: <error>": (
        "return tensors, arrays, numbers, text or containers of them"
    ),
    "give either cache_num (samples of the window) or capacity (bytes for them)": "give one of the two",
    "<what> needs Linux, and this is <platform>: <instead>": "use what the message names",
    "packages=<packages> needs the cache of a CachedDataset(..., policy='importance'), and on_miss='swap'"
    " or 'substitute'": "give such a cache, or leave out packages",
    "<count> ranks on <nodes> nodes: every node needs as many ranks as any other": "start as many on each",
    "a host was given with <why>": "correct that entry of hosts",
    "the job's key-value store at MASTER_ADDR=<host>, MASTER_PORT=<port> ended while the store <name> was made: <0>": (
        "see why the first node ended, and start the job again"
    ),
    "of the <count> nodes of the job, number <shown> did not make the store <name> in time: all nodes have to, "
    "at about the same time": "make the store in the same place of the script on all nodes",
    "interface=<interface>: <expected>": "give such an address or name",
    "interface=<interface> is none of this host (<error>): <expected>": "give such an address or name",
    "interface=<interface> stands for all networks of this host: <expected>": "give such an address or name",
    "the process that keeps the server running died <starts> times; the end of <number>: <number>": (
        "mend what the log says"
    ),
    "the cluster of <0> has no table of slots (<problem>): repair it": "see `redis-cli --cluster check`",
    "store=<store>: a list is [DiskTier(...), RedisStore(...)], the faster one first": "give that, or one of them",
    "persistent_workers=True needs num_workers of 1 or more": "give workers, or leave it out",
    "drop_last=True needs a batch_size": "give a batch_size, or leave out drop_last",
    "batch <number> could not be made:\n<trace>": "mend what the traceback shows",
    "the sampler gave <ids>: ids of samples must be integers, in a list for each batch": ("correct the sampler"),
    "process <pid>, which prepares for the group <name>, did not let this job in within <seconds> s: "
    "<names>": "start all ranks of the job, or give a larger timeout",
    "num_workers=0: the workers belong to the group, which needs 1 or more": "give 1 or more",
    "consumer <number> is iterated by process <pid>, and not by this one, a child of it: "
    "ProcessPrefetcher(consumers=...) can serve both": "give this process a consumer of its own",
    "the process that loads raised <what>": "mend what the traceback shows",
    "debug=True with keep=<keep>: only batches of keep='ring' become invalid": "leave out debug",
    "step(batch) raised <type>: <error>. It gets what the loader yields, here <batch>": "correct the step",
    "sizes must be one int of 1 or more for each of the ids 0 to <most>; given were <size> of type "
    "<dtype>": "give these",
    "scores must be a number for each of the ids 0 to <number>, or a row of them for each of <epochs> "
    "epochs, none of them NaN; given was <given>": "give these",
    "capacity=<capacity>: without sizes give a number of samples of 1 or more, or a share such as '35%'": (
        "or give sizes"
    ),
    "load, and transfer or compute, must be above 0 seconds": "give times above 0",
    "<place>: the argument <name> is unknown: <advice>": "use one of those that the message names",
    "<place>: label=<label>, and <name> wants the path of a volume; for numbers use a "
    "ClassificationImagePipeline": "give a path, or use that pipeline",
    "<self>: field <field> holds a <type> and no bytes of a file: files are read for LoadNifti if it is "
    "the first transform, and a number is no file": "put LoadNifti first, and name fields that hold paths",
    "<self>: the <data> bytes of field <field> are no whole NIfTI volume (<type>: <error>)": ("write the file again"),
    'the configuration <text> has neither a section "train" nor "validate": nothing to build': "add one",
    "<name>.<key> is missing: a section needs image_pipeline and pre_transforms": "add it",
    "field <field> comes out as <type>: no transform loads it": "add a transform that does, such as LoadNifti",
    "<place> cannot be made: <kind><error>": "correct its args",
    "<place> is no transform: its instances cannot be called with a sample": "name a class with __call__",
    "<place>: <name> is no transform of stallfree, and MONAI, whose names work too, is not installed (pip"
    " install monai): <ours>": "install MONAI, or use one of those named",
    "<place>: <name> is a transform neither of stallfree nor of MONAI <version>: <ours>; for one of your "
    'own give {"path": "module.Class"}': "use one of those named",
    "<place>: <error>: its arguments are <names>": "give these",
}
"""What to do, for messages that do not say it themselves."""


def main() -> int:
    """Write the page, or check it."""
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
