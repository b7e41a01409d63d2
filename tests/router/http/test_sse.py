from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from router.http import sse


@given(st.text())
def test_any_text_is_one_event_of_one_line(text):
    frame = sse.event({"text": text})
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    payload = frame[6:-2]
    assert b"\n" not in payload
    assert b"\r" not in payload
    assert json.loads(payload) == {"text": text}


def test_the_end_mark_is_openai_s():
    assert sse.DONE == b"data: [DONE]\n\n"
