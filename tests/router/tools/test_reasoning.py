import pytest

from router.tools.reasoning import ReasoningParser

CASES = {
    "tags": (False, "<think>\nI see. </b>\n\n</think>\n\nYes </think>\n", ("I see. </b>", "Yes </think>\n")),
    "opened by the prompt": (True, " hm\n</think> Yes", ("hm", "Yes")),
    "none": (False, " It < 5 <think>", ("", " It < 5 <think>")),
    "the start of a tag": (False, "<thin", ("", "<thin")),
    "open at the end": (False, "<think>so </thi", ("so </thi", "")),
    "space only": (False, "  ", ("", "  ")),
    "empty": (False, "<think>\n\n</think>\n\nYes", ("", "Yes")),
}


def parse(is_open, *parts):
    parser = ReasoningParser(is_open=is_open)
    found = [parser.push(part) for part in parts] + [parser.finish()]
    return "".join(pair[0] for pair in found), "".join(pair[1] for pair in found)


@pytest.mark.parametrize("name", CASES)
def test_reasoning_is_split_off_at_every_cut(name):
    is_open, text, expected = CASES[name]
    assert parse(is_open, text) == expected
    assert parse(is_open, *text) == expected
    for cut in range(len(text)):
        assert parse(is_open, text[:cut], text[cut:]) == expected
