"""The sandbox of chat templates: whatever a template computes ends in time, and makes nothing large."""

import itertools

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import InvalidRequest
from core.model.template_sandbox import RenderTooSlow, TemplateSandbox

MESSAGES = [{"role": "user", "content": "some words"}, {"role": "assistant", "content": ["a", "b"], "tool_calls": [{"n": 1}]}]
NEST = "{% for i in range(100000) %}"
END = "{% endfor %}"


def grown(value, first="messages", before=""):
    """Return a template that makes a value of itself again and again."""
    return f"{{% set n = namespace(x={first}) %}}{NEST}{before}{{% set n.x = {value} %}}{END}"


def render(source, seconds_per_look=0.0):
    """Render with a clock that moves on at each look."""
    ticks = itertools.count(step=seconds_per_look)
    sandbox = TemplateSandbox(lambda: next(ticks))
    return sandbox.render(sandbox.template(source), {"messages": MESSAGES})


SLOW = {
    "nested loops": f"{NEST}{NEST}{NEST}{END}{END}{END}",
    "a loop over loops without a turn": f"{NEST}{NEST.replace(' %', ' if false %')}{END}{END}",
    "a loop that fills a block": f"{{% set x %}}{NEST}{NEST}a{END}{END}{{% endset %}}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a call block in itself": (
        "{% macro f(n) %}{{ caller() if n == 0 else '' }}{% if n %}{% call f(n - 1) %}x{% endcall %}"
        "{% call f(n - 1) %}x{% endcall %}{% endif %}{% endmacro %}{% call f(50) %}y{% endcall %}"
    ),
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "filters of filters": f"{NEST}{{{{ range(1000) | map('string') | map('upper') | list | length }}}}{END}",
    "a filter in a condition": f"{NEST}{{{{ range(1000) | selectattr('x') | first is defined }}}}{END}",
    "a generator that is joined": f"{NEST}{{{{ range(100000) | map('string') | join }}}}{END}",
    "numbers that grow": f"{{% set n = namespace(x=3) %}}{NEST}{{% set n.x = n.x + n.x %}}{END}",
}
LARGE = {
    "a text times a number": "{{ 'ab' * 10 ** 9 }}",
    "a number times a text": "{{ 10 ** 9 * 'ab' }}",
    "a list times a number": "{{ [messages] * 10 ** 8 }}",
    "a text that doubles": grown("n.x + n.x", "'ab'"),
    "a text joined to itself": grown("n.x ~ n.x", "'ab'"),
    "a block in a block": grown("y", "'ab'", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}"),
    "a list of itself": grown("[n.x, n.x]"),
    "a tuple of itself": grown("(n.x, n.x)"),
    "a mapping of itself": grown("dict(a=n.x, b=n.x)"),
    "a literal mapping of itself": grown("{'a': n.x, 'b': n.x}"),
    "a list that doubles": grown("n.x + n.x"),
    "a mapping of one value": "{{ {}.fromkeys(range(100000), messages) }}",
    "a default in a list": "{% set x = 'a' * 10000 %}{{ ([none] * 100000) | map('default', x, true) | list }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a number squared": f"{{% set n = namespace(x=3) %}}{NEST}{{% set n.x = n.x * n.x %}}{END}",
    "a wide format": "{{ '%999999999d' | format(1) }}",
    "a wide format by an operator": "{{ '%999999999d' % 1 }}",
    "a width as an argument": "{{ '%*d' % (999999999, 1) }}",
    "a wide format by a method": "{{ '{:>999999999}'.format(1) }}",
    "a width in a width": "{{ '{:>{}}'.format(1, 999999999) }}",
    "a format of a long text": "{{ ('%s' * 10000) | format('a' * 1000000) }}",
    "a column": "{{ 'a' | center(10 ** 9) }}",
    "a method that fills": "{{ 'a'.ljust(10 ** 9) }}",
    "a method that fills with zeros": "{{ 'a'.zfill(10 ** 9) }}",
    "tabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "an indent": "{{ ('\\n' * 1000000) | indent(1000) }}",
    "an indent of JSON": "{{ messages | tojson(indent=10 ** 9) }}",
    "a batch": "{{ [1] | batch(10 ** 9, 1) | list }}",
    "a batch of one value": "{{ [1] | batch(1000, messages) | list }}",
    "slices": "{{ [1] | slice(10 ** 9) | list }}",
    "a replacement": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "a replacement by a method": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "a separator": "{{ range(100000) | join('a' * 100000) }}",
    "a separator by a method": "{{ ('a' * 100000).join(['x', 'y'] * 50000) }}",
    "a sum of lists": "{{ [[1]] | sum(start=[]) }}",
    "rounding": "{{ 7 | round(-(10 ** 9)) }}",
}


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_what_takes_too_long_ends_at_its_deadline(source):
    with pytest.raises(RenderTooSlow):
        render(source, seconds_per_look=0.02)


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_what_becomes_too_large_is_refused_before_it_is_made(source, monkeypatch):
    monkeypatch.setattr("core.model.template_sandbox.MAX_RENDERED", 4 << 20)
    with pytest.raises(InvalidRequest, match="the chat template") as refused:
        render(source)
    assert not isinstance(refused.value, RenderTooSlow)


@pytest.mark.parametrize("name", ["lipsum()", "'a' | urlize", "'a' | striptags", "'a' | wordwrap", "'a' | pprint"])
def test_what_no_prompt_needs_is_not_there(name):
    with pytest.raises(jinja2.exceptions.TemplateError):
        render(f"{{{{ {name} }}}}")


HARMLESS = [
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.content | trim }}{% endfor %}",
    "{% for m in messages if m.role == 'system' %}x{% else %}-{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content | join(', ') }}{% break %}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v }}{{ ';' if not loop.last }}{% endfor %}",
    "{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is not number else i }},{% endfor %}",
    "{% macro f(a, b=2) %}{{ a }}-{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(3, b=4) %}x{% endcall %}",
    "{% set n = namespace(x=[]) %}{% for m in messages %}{% set n.x = n.x + [m.role] %}{% endfor %}{{ n.x }}{{ n.x | tojson }}",
    "{{ messages | tojson(indent=2) }}{{ messages | map(attribute='role') | list | join('/') }}",
    "{{ messages | selectattr('role', 'in', ['user', 'tool']) | map(attribute='content') | first }}",
    "{{ '%s in 2023: %5.1f%%' | format('x', 2.25) }}{{ '%d' % 7 }}{{ '{} {:>4}'.format('a', 1) }}{{ '-' * 5 }}",
    "{{ 'a b' | replace(' ', '_') | upper | title | indent(2, true) | center(20) }}{{ 'x'.join(['a', 'b']) }}",
    "{{ ('a', messages[1].content)[1][::-1] }}{{ {'a': [1]}['a'] }}{{ (1, 2) + (3,) }}{{ 2 ** 10 }}{{ [3, 1] | sort | sum }}",
    "{{ 'A' 'b' }}{{ 'aXb'.split('X') }}{{ messages | length }}{{ x | default('none') }}{{ 1 if x is defined else 2 }}",
    "{% filter upper %}ab{% endfilter %}{% set y %}{{ messages[0].content }}{% endset %}{{ y | length }}",
    "{{ ', '.join(messages | map(attribute='role')) }}{{ ('a' * 3000) | truncate(2000) | length }}",
    "{{ messages | groupby('role') | map('first') | list }}{{ range(5) | batch(2) | list }}{{ 2.345 | round(1) }}",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_the_rest_is_rendered_as_by_jinja2(source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    assert render(source) == plain.from_string(source).render(messages=MESSAGES)


def test_each_thread_and_each_rendering_has_its_own_deadline():
    now = [0.0]
    sandbox = TemplateSandbox(lambda: now[0])

    def later():
        now[0] += 3.0
        return "x"

    template = sandbox.template("{{ later() }}{{ later() }}{{ later() }}")
    with pytest.raises(RenderTooSlow, match="more than 5 s"):
        sandbox.render(template, {"later": later}, limit_s=5.0)
    assert sandbox.render(template, {"later": later}) == "xxx"


def test_large_values_that_a_template_keeps_are_bounded_together(monkeypatch):
    monkeypatch.setattr("core.model.template_sandbox._MAX_MADE", 100_000_000)
    with pytest.raises(InvalidRequest, match="the chat template makes more"):
        render(grown("[n.x, namespace(v='a' * 10000000)]"))


def test_json_has_the_separators_that_a_template_wants():
    assert render("{{ {'a': [1, 2]} | tojson(separators=(',', ':'), sort_keys=true) }}") == '{"a":[1,2]}'
