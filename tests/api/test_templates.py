"""Templates of the kinds that models come with, in our own words: they render here as transformers renders them."""

from pathlib import Path

import pytest

from bench import templates
from kilburn.controller.api.messages import for_template

WITH_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content and loop.index0 < seen.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- if message.reasoning_content is defined %}{{ '(' + message.reasoning_content.strip() + ')' }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson(indent=2) }}{{ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
STRICT = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user ...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
MACROS = """
{%- macro shown(value, depth=0) -%}
    {%- if value is mapping -%}
        {%- for key, item in value | dictsort -%}
            {{ '\\n' + '  ' * depth + key + ': ' + shown(item, depth + 1) }}
        {%- endfor -%}
    {%- elif value is sequence and value is not string -%}
        {%- for item in value -%}{{ '\\n' + '  ' * depth + '- ' + shown(item, depth + 1) }}{%- endfor -%}
    {%- else -%}{{ value | string }}{%- endif -%}
{%- endmacro -%}
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif -%}
<|start|>system<|message|>Today is {{ date_string }}.{{ shown(tools) if tools else '' }}<|end|>
{% for message in messages %}
<|start|>{{ message.role | upper }}<|message|>{{ message.content | replace('\\n\\n', '\\n') }}
{%- generation %}{{ shown(message.tool_calls) if message.tool_calls }}{% endgeneration %}<|end|>
{% if loop.index > 6 %}{% break %}{% endif %}
{% endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
"""


@pytest.mark.parametrize("source", [WITH_TOOLS, STRICT, MACROS], ids=["with tools", "strict", "macros"])
def test_what_a_template_renders_is_what_transformers_renders(source: str) -> None:
    tally = templates.compare(source)
    assert tally.different == []
    assert tally.equal > 100
    assert source is not STRICT or tally.refused > 10, "and what one refuses, both do"


def test_the_command_prints_a_line_for_each_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.jinja").write_text("{{ messages | length }}")
    assert templates.main(["--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "one"
    with pytest.raises(SystemExit):
        templates.main(["--folder", str(tmp_path / "none")])


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_what_a_model_thought_is_there_under_every_name_that_templates_read(name: str) -> None:
    (message,) = for_template([{"role": "assistant", "content": "4", name: "two and two"}])
    assert message["reasoning_content"] == message["thinking"] == "two and two"
