"""Chat templates: where they come from, what they may do, how they fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import CheckpointError, InvalidRequestError
from headwater.services.router.text.chat_template import ChatTemplate

HELLO = ({"role": "user", "content": "Hello"},)
SIMPLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "test", {"bos_token": "<s>", "eos_token": "</s>"})


def _write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_real_template_of_the_test_model() -> None:
    template = ChatTemplate.load(Path(__file__).parents[1] / "data" / "text_model")
    assert template is not None
    assert template.render(HELLO) == ("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_blocks_leave_no_white_space() -> None:
    source = "{{ bos_token }}\n    {% for m in messages %}\n{{ m.content }}\n    {% endfor %}\nend"
    assert _template(source).render(HELLO) == "<s>\nHello\nend"


def test_functions_and_filters_that_templates_expect() -> None:
    source = (
        "{{ {'b': 'é<&>', 'a': 1} | tojson }}|{{ [1] | tojson(indent=1) }}|"
        "{{ strftime_now('%Y') }}|"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}|"
        "{% generation %}words{% endgeneration %}|{{ add_generation_prompt }}"
    )
    got = _template(source).render(HELLO)
    assert re.fullmatch(r'\{"b": "é<&>", "a": 1\}\|\[\n 1\n\]\|\d{4}\|01\|words\|True', got)


def test_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    _write_config(
        tmp_path,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        pad_token=None,
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}",
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "<s></s>False"


def test_template_file_goes_before_the_config(tmp_path: Path) -> None:
    _write_config(tmp_path, chat_template="from config")
    (tmp_path / "chat_template.jinja").write_text(SIMPLE, encoding="utf-8")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "[user]Hello"


def test_the_default_of_named_templates_counts(tmp_path: Path) -> None:
    _write_config(
        tmp_path,
        chat_template=[
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": SIMPLE},
        ],
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "[user]Hello"


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}])
def test_a_model_may_have_no_template(tmp_path: Path, config: dict[str, Any] | None) -> None:
    if config is not None:
        _write_config(tmp_path, **config)
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        ("{% if %}", "line 1: the chat template is not valid"),
        (7, "must be a string or a list"),
        ([{"name": "default"}], "must be a string or a list"),
        ([{"name": "tool_use", "template": "x"}], 'tool_use.* is called "default"'),
        ([], "there are none"),
    ],
)
def test_unusable_template_is_named(tmp_path: Path, chat_template: Any, message: str) -> None:
    _write_config(tmp_path, chat_template=chat_template)
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: chat_template: .*{message}"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_the_request_s_fault(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^chat: the model's chat template refuses"):
        _template(source).render(HELLO)


def test_a_refusal_keeps_the_template_s_words() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        _template("{{ raise_exception('roles must alternate') }}").render(HELLO)
