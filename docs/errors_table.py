"""Writes `docs/errors/index.md`: a table of the pages of errors, by topic.

    python docs/errors_table.py          # write the page
    python docs/errors_table.py --check  # exit code 1 if it does not show the pages as they are

The line of a page is its first paragraph.
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGES = Path(__file__).parent / "errors"
INDEX = PAGES / "index.md"

TOPICS = {
    "Arguments, states and files": """
        argument-value argument-conflict unit-format not-picklable object-closed package-missing needs-linux
        state-format state-mismatch release-mismatch file-unreadable file-unwritable""",
    "Data set and pipeline": """
        dataset-type dataset-empty dataset-changed dataset-random iterable-unsupported value-unstorable
        transform-input image-unreadable image-folder tar-unreadable tar-samples cut-attribute cut-refused cut-random
        no-files no-fingerprint""",
    "Cache": """
        cache-mismatch cache-damaged cache-not-found cache-required cache-ids capacity-too-large capacity-too-small
        storage-full folder-unusable folder-owner folder-gone name-invalid lock-held window-late record-malformed
        record-class""",
    "Samplers, importance and ranks": """
        sampler-output sampler-mismatch loss-update ranks-conflict seed-agreement launch-environment""",
    "Loader": "batch-timeout batch-failed worker-died main-guard stop-iteration iteration-over collate-output",
    "Shared loader": "group-mismatch group-timeout",
    "Several nodes": """
        server-missing server-failed server-unreachable server-refused server-address port-unavailable
        network-interface nodes-missing""",
    "Device": "device-unknown producer-ended prefetcher-process",
    "Analysis and command line": "job-function job-failed run-too-large",
    "Configurations of Clara": "clara-configuration clara-field",
}

INTRODUCTION = """\
<!-- written by docs/errors_table.py -->

# Messages

The last line of a message is the address of one of these pages, which says what the message means and what to do.
`error.page` is the name of the page. The classes are in [the reference](../reference/errors.md). An error of your own
code in a data set, a transform or a `collate_fn` is raised as it is, with a note that names the sample.
"""


def index() -> str:
    """The index, out of the pages."""
    lines = [INTRODUCTION]
    for topic, names in TOPICS.items():
        lines += [f"## {topic}", "", "| page | what it means |", "| --- | --- |"]
        for name in names.split():
            summary = (PAGES / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[1].replace("\n", " ")
            lines.append(f"| [{name}]({name}.md) | {summary} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write the index, or compare it."""
    if "--check" in sys.argv[1:]:
        sys.exit(INDEX.read_text(encoding="utf-8") != index())
    INDEX.write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    main()
