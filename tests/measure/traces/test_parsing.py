"""Events come out whole wherever the text is cut, and what is wrong is said with its place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapkit.measure.traces import parsing
from overlapkit.measure.traces.opening import TraceError
from overlapkit.measure.traces.parsing import EventReader
from tests.measure.traces.hand import HandTrace


class Text:
    """A stream that gives as little as it may."""

    def __init__(self, text: str | bytes, most: int = 1 << 30) -> None:
        self._left = text.encode() if isinstance(text, str) else text
        self._most = most

    def read(self, size: int) -> bytes:
        size = min(size, self._most)
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def read(text, most=1 << 30):
    reader = EventReader("t.json", Text(text, most))
    return [event for chunk in reader.chunks() for event in chunk], reader


def error_of(text) -> str:
    with pytest.raises(TraceError) as error:
        read(text)
    assert str(error.value).startswith("t.json: ")
    assert "\n" not in str(error.value)
    return str(error.value)


NASTY = ['}, {"ph"', "}]", '\\"', '"', "],", "\\", "{[", "é\u2028", "traceEvents", ""]
names = st.lists(st.sampled_from(NASTY), max_size=3).map("".join)
nested = st.recursive(
    st.one_of(names, st.integers(-5, 5), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def test_blank_chunks_before_the_trace(monkeypatch):
    monkeypatch.setattr(parsing, "_CHUNK", 8)
    assert len(read(" " * 50 + f'{{"traceEvents": [{EVENT}]}}')[0]) == 1
    assert "byte 50: no JSON" in error_of(" " * 50 + "x")


@given(
    st.lists(st.tuples(names, nested, st.integers(0, 9)), max_size=8),
    st.integers(1, 200),
    st.sampled_from([None, 1]),
    nested,
)
def test_any_cut_gives_the_events_that_json_gives(raw, chunk, indent, beside):
    events = [{"name": name, "args": {"x": value, "stream": number}} for name, value, number in raw]
    trace = {"a": beside, "traceEvents": events, "b": beside, "baseTimeNanoseconds": 7}
    before = parsing._CHUNK
    parsing._CHUNK = chunk
    try:
        found, reader = read(json.dumps(trace, indent=indent))
        bare, _ = read(json.dumps(events, indent=indent))
    finally:
        parsing._CHUNK = before
    assert [(event.name, event.args.stream) for event in found] == [(name, n) for name, _, n in raw]
    assert [event.name for event in bare] == [event.name for event in found]
    assert (reader.count, reader.base_ns) == (len(raw), 7)


def test_a_stream_may_give_a_byte_at_a_time():
    trace = HandTrace(rank=3)
    trace.work("k", 1.25, 2)
    (event,), reader = read(b"\xef\xbb\xbf \n" + trace.text().encode(), most=1)
    assert (event.name, event.ts, event.args.stream) == ("k", 1.25, 7)
    assert reader.info["rank"] == 3


EVENT = '{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":2}'

BROKEN = {
    "empty": ("", "is empty"),
    "blank": (" \n", "is empty"),
    "no JSON": ("<html>", "byte 0: no JSON: it begins with b'<html>'"),
    "a number": ("17", "no JSON"),
    "another object": ('{"events": [1]}', "no traceEvents: this JSON is no Kineto or Chrome trace"),
    "no array": ('{"traceEvents": {"a": 1}}', "Expected `null`, got `object` - at `$.traceEvents`"),
    "nothing follows": ('{"traceEvents": [', "cut off"),
    "cut in the head": ('{"schemaVersion": 1, "dev', "byte 25: cut off"),
    "cut within an event": (f'{{"traceEvents": [{EVENT}, {EVENT[:20]}', "byte 90: cut off"),
    "cut after an event": (f'{{"traceEvents": [{EVENT}', "byte 68: cut off"),
    "cut after the events": (f'{{"traceEvents": [{EVENT}], "traceName"', "byte 82: cut off"),
    "cut at the last brace": (f'{{"traceEvents": [{EVENT}]', "byte 69: cut off"),
    "bare array, cut": (f"[{EVENT},", "byte 53: cut off"),
    "text behind": (f"[{EVENT}] x", "more text behind the events: b'x'"),
    "no comma": (f'{{"traceEvents": [{EVENT} {EVENT}]}}', "byte 69: broken JSON"),
    "a comma too many": (f'{{"traceEvents": [{EVENT},]}}', "broken JSON"),
    "NaN": (f'{{"traceEvents": [{EVENT}, {{"ts": NaN}}]}}', "byte 77: broken JSON"),
    "infinite": ('{"traceEvents": [{"ts": 1e999}]}', "event 0 (traceEvents[0]): Number out of range"),
    "mismatched": (f'{{"traceEvents": [{EVENT}}}}}', "byte 68: broken JSON: }"),
    "no event": (
        f'{{"traceEvents": [{EVENT}, 5]}}',
        "event 1 (traceEvents[1]): Expected `object`, got `int`",
    ),
    "a time in words": ('{"traceEvents": [{"ts": "soon"}]}', "event 0 (traceEvents[0]): Expected `float"),
    "a name of numbers": ('{"traceEvents": [{"name": [1]}]}', "event 0"),
    "deep": ('{"traceEvents": [' + '{"args":' * 100_000, "nested too deeply"),
    "deep in the head": ('{"a":' * 100_000, "nested too deeply"),
    "events twice": (f'{{"traceEvents": [{EVENT}], "traceEvents": [{EVENT}]}}', "$.traceEvents"),
    "control characters": ('{"traceEvents": [{"name": "\x01"}]}', "broken JSON"),
    "no UTF-8": (b'{"traceEvents": [{"name": "\xff\xfe"}]}', "t.json: "),
}


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_wrong_is_said_with_its_place(text):
    raw, words = BROKEN[text]
    assert words in error_of(raw)


def test_a_file_cut_anywhere_is_an_error_there():
    trace = HandTrace()
    trace.work('"},{"', 1, 2, launch=0)
    trace.step(1, 0, 3)
    text = trace.text()
    for end in range(1, len(text)):
        error = error_of(text[:end])
        assert f"byte {end}: cut off" in error, (end, error)


def test_an_error_far_into_the_file_has_its_event(monkeypatch):
    monkeypatch.setattr(parsing, "_CHUNK", 4096)
    events = [EVENT] * 500 + ['{"ts": "x"}'] + [EVENT] * 500
    assert "event 500 (traceEvents[500])" in error_of('{"traceEvents": [' + ",".join(events) + "]}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"traceEvents": [{"name": "' + "x" * 3000, "event 0 is longer than"),
        ('{"x": "' + "x" * 3000, "no traceEvents within the first"),
        ('{"traceEvents": [], "x": "' + "x" * 3000, "behind the events"),
    ],
)
def test_what_never_ends_is_not_read_to_its_end(monkeypatch, text, words):
    monkeypatch.setattr(parsing, "_CHUNK", 64)
    monkeypatch.setattr(parsing, "_LIMIT", 1024)
    assert words in error_of(text)
