"""The tokenizer and its chat template sandbox."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.errors import ConfigError, InvalidRequest
from core.model.hub import read_model_folder
from core.model.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[3]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Où es-tu ? <b>&</b>"}, {"role": "assistant", "content": "Here is"}]

# Each uses one thing that templates in the wild rely on.
TEMPLATES = {
    "chatml": CHATML,
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "whitespace": "{% for m in messages %}\n    {% if true %}\n  {{ m.role }}\n    {% endif %}\n{% endfor %}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "undefined": "{{ missing }}{% if tools is none %}none{% endif %}{% if custom is defined %}{{ custom }}{% endif %}",
    "special tokens": "{{ bos_token }}{{ messages[0].content | trim }}{{ eos_token }}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "strings": "{{ messages[0]['content'].strip().split(' ')[0].upper() }}{{ messages[-1].content[:4] }}",
    "dates": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_like_transformers(name, add_generation_prompt, model_folder):
    special = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    files = model_folder(chat_template=TEMPLATES[name], **special)
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(files.tokenizer_file), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    expected = reference.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        custom="given",
    )
    rendered = Tokenizer(files).apply_chat_template(
        MESSAGES, add_generation_prompt=add_generation_prompt, template_args={"custom": "given", "limit_s": 0}
    )
    assert rendered == expected


SPECIAL_TOKENS_MAP = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bos_token": "<|im_end|>"},
        {"bos_token": "<|im_end|>", "added_tokens_decoder": {}},
        {"bos_token": None, "added_tokens_decoder": {}},
    ],
)
def test_special_tokens_of_old_folders_are_those_transformers_takes(settings, model_folder, tmp_path):
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    folder = model_folder(chat_template=TEMPLATES["special tokens"], **settings).path
    (folder / "special_tokens_map.json").write_text(json.dumps(SPECIAL_TOKENS_MAP))
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False)
    tokenizer = Tokenizer(read_model_folder("tiny", folder, tmp_path))
    assert tokenizer.apply_chat_template(MESSAGES) == expected
    assert tokenizer.unknown_template_tokens == ([] if "added_tokens_decoder" not in settings else ["eos_token"])


def test_requests_with_tools_have_a_template_of_their_own(model_folder, tmp_path):
    templates = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML},
    ]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": templates}
    folder = model_folder().path
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, reference = Tokenizer(read_model_folder("tiny", folder, tmp_path)), AutoTokenizer.from_pretrained(folder)
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        expected = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
        assert tokenizer.apply_chat_template(MESSAGES, template_args={"tools": tools}) == expected
    assert "tools" in tokenizer.tool_template_variables - tokenizer.template_variables


def test_date_comes_from_the_given_clock(model_folder):
    files = model_folder(chat_template="{{ strftime_now('%d %b %Y') }}")
    tokenizer = Tokenizer(files, wall_clock=lambda: datetime(2026, 3, 1))
    assert tokenizer.apply_chat_template(MESSAGES) == "01 Mar 2026"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("It is ", "<|im_start|>assistant\nIt is "),
        ([{"type": "text", "text": "It is "}], "<|im_start|>assistant\nIt is "),
    ],
)
def test_continuing_the_final_message_leaves_it_open(content, expected, model_folder):
    template = CHATML.replace(
        "message['content']", "(message['content'] if message['content'] is string else message['content'][0]['text'])"
    )
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    text = Tokenizer(model_folder(chat_template=template)).apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith(expected)
    assert messages[1]["content"] == content


@pytest.mark.parametrize(
    ("template", "messages", "options", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, {}, "roles must alternate"),
        (CHATML, [{"role": "user", "content": None}], {}, "refused"),
        (CHATML, [{"content": "no role"}], {}, "refused"),
        ("{{ messages[5].content }}", MESSAGES, {}, "refused"),
        ("{{ 1 / 0 }}", MESSAGES, {}, "refused"),
        ("{{ '{}'.format() }}", MESSAGES, {}, "refused"),
        (CHATML, MESSAGES, {"continue_final_message": True}, "exclude each other"),
        (CHATML, [], {"continue_final_message": True, "add_generation_prompt": False}, "ends with text"),
        ("{{ messages[0].content }}", MESSAGES, {"continue_final_message": True, "add_generation_prompt": False}, "drops"),
        (None, MESSAGES, {}, "no chat template"),
    ],
)
def test_what_cannot_be_rendered_is_the_clients_error(template, messages, options, words, model_folder):
    tokenizer = Tokenizer(model_folder(chat_template=template))
    with pytest.raises(InvalidRequest, match=words) as caught:
        tokenizer.apply_chat_template(messages, **options)
    assert caught.value.param in ("messages", "continue_final_message")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ],
)
def test_a_hostile_template_gets_nowhere(template, model_folder):
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(InvalidRequest):
        Tokenizer(model_folder(chat_template=template)).apply_chat_template(messages)
    assert messages == MESSAGES


def test_a_template_that_does_not_compile_is_a_config_error(model_folder):
    with pytest.raises(ConfigError, match="does not compile"):
        Tokenizer(model_folder(chat_template="{% if %}"))


def test_a_broken_tokenizer_file_is_a_config_error(model_folder):
    files = model_folder()
    files.tokenizer_file.write_text('{"model": 1}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(files)


def test_encodes_special_tokens_in_text_and_decodes_with_or_without(model_folder):
    tokenizer = Tokenizer(model_folder(bos_token="<|im_start|>"))
    ids = tokenizer.encode("<|im_start|>déjà vu<|im_end|>")
    assert ids[0] == 0
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.decode(ids) == "déjà vu"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>déjà vu<|im_end|>"


def test_ids_outside_the_vocabulary_decode_to_nothing(model_folder):
    tokenizer = Tokenizer(model_folder())
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == ""
    assert tokenizer.token(10**6) is None


def test_reports_eos_and_vocabulary(model_folder, byte_level_backend):
    tokenizer = Tokenizer(model_folder())
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == byte_level_backend.get_vocab_size()


def test_truncation_and_padding_of_the_file_are_switched_off(model_folder, byte_level_backend):
    from tokenizers import Tokenizer as Backend

    limited = Backend.from_str(byte_level_backend.to_str())
    limited.enable_truncation(max_length=3)
    limited.enable_padding(length=8)
    assert len(Tokenizer(model_folder(limited)).encode("the quick brown fox jumps over")) > 8 - 3


@pytest.mark.slow
def test_the_router_side_never_imports_torch():
    code = (
        "import sys; import core.model.detokenizer, core.model.tokenizer, core.model.hub, core.model.arch, core.model.gguf;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False, timeout=60).returncode == 0


def test_a_conversation_that_renders_too_long_is_refused(model_folder, monkeypatch):
    monkeypatch.setattr("core.model.template_sandbox.MAX_RENDERED", 1000)
    tokenizer = Tokenizer(model_folder(chat_template="{% for i in range(500) %}{{ messages[0].content }}{% endfor %}"))
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == 500
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        tokenizer.apply_chat_template([{"role": "user", "content": "xyz"}])


def test_a_conversation_that_renders_too_slowly_is_refused(model_folder):
    files = model_folder(chat_template="{% for i in range(50) %}{{ messages[0].content }}{% endfor %}")
    times = itertools.count(step=0.5)
    with pytest.raises(InvalidRequest, match="more than 10 s"):
        Tokenizer(files, monotonic=lambda: next(times)).apply_chat_template([{"role": "user", "content": "x"}])


def test_the_variables_that_a_template_reads_are_known(model_folder):
    template = "{# documents #}{% if tools %}{{ tools | tojson }}{% endif %}{% set builtin = 1 %}{{ builtin }}"
    assert Tokenizer(model_folder(chat_template=template)).template_variables == {"tools"}
    assert Tokenizer(model_folder()).template_variables == frozenset()
