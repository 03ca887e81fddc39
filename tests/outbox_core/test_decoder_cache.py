"""Threads that need the decoder of the same shape at the same moment: each gets a whole one, and nobody crashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from outbox_core.protocol.decoder_cache import json_decoder, known, msgpack_decoder
from outbox_core.protocol.wire import PullAnswer

ROOT = Path(__file__).parents[2]

RACE = """
import enum, sys, threading
import msgspec
from outbox_core.protocol.decoder_cache import json_decoder, known, msgpack_decoder

sys.setswitchinterval(1e-6)
for number in range(1_500):
    word = enum.StrEnum("Word", {f"W{n}": f"w{n}" for n in range(5)})
    shape = msgspec.defstruct("Shape", [("a", int), ("word", word), ("words", list[word])])
    value = {"a": 1, "word": "w1", "words": ["w2"]}
    together = threading.Barrier(3)

    def decode(act):
        together.wait()
        act()

    acts = [
        lambda: json_decoder(shape).decode(msgspec.json.encode(value)),
        lambda: msgpack_decoder(shape).decode(msgspec.msgpack.encode(value)),
        lambda: msgspec.convert(value, known(shape)),
    ]
    threads = [threading.Thread(target=decode, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("whole")
"""


@pytest.mark.processes
def test_threads_that_build_a_decoder_of_the_same_shape_do_not_crash_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", RACE],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip

    assert (ended.returncode, ended.stdout.strip()) == (0, "whole"), ended.stderr[:2_000]


def test_a_decoder_is_built_once() -> None:
    assert json_decoder(PullAnswer) is json_decoder(PullAnswer)
    assert msgpack_decoder(PullAnswer) is msgpack_decoder(PullAnswer)
    assert known(PullAnswer) is PullAnswer
    assert msgspec.convert({"deliveries": []}, known(PullAnswer)).deliveries == []
