"""The page of messages has every error that stallfree raises, as its source says it, with what to do."""

from __future__ import annotations

import ast
import runpy
from typing import Any

from doc_pages import ROOT

TABLE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "errors_table.py"))
MESSAGES = TABLE["messages"]()


def test_the_page_is_what_the_source_says() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page == TABLE["page"](), "run: python docs/errors_table.py"


def test_every_message_says_what_to_do() -> None:
    assert [message.says for message in MESSAGES if not message.advice] == []


def test_all_advice_belongs_to_a_message() -> None:
    assert set(TABLE["ADVICE"]) <= {message.says for message in MESSAGES}


def test_every_class_is_on_the_page_and_every_topic_has_messages() -> None:
    assert {message.topic for message in MESSAGES} == set(TABLE["TOPICS"])
    for name in TABLE["CLASSES"]:
        if name != "StallfreeError":
            assert f"| {name} |" in TABLE["INTRODUCTION"]


def test_texts_are_read_as_they_come_out() -> None:
    source = """
ADVICE = "give another one"

def check(size, name):
    problem = f"{name}={size!r} is odd: {ADVICE}"
    if size % 2:
        raise InputError(problem)
    raise StorageError("the folder " + f"{check(name).parent} is full. " "Make room")
    raise InputError(str(error))
"""
    assert list(TABLE["_errors"](ast.parse(source))) == [
        ("InputError", "<name>=<size> is odd: give another one"),
        ("StorageError", "the folder <parent> is full. Make room"),
    ]
    assert TABLE["_parted"]("<name>=<size> is odd: give another one") == ("<name>=<size> is odd:", "give another one")
    assert TABLE["_parted"]("the folder <parent> is full. Make room") == ("the folder <parent> is full.", "Make room")
