"""The checkpoint's chat template: a conversation to the text the model was trained on.

Templates come with checkpoints, so they run in jinja's sandbox and cannot reach the process.
"""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headwater.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from jinja2.parser import Parser

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_DEFAULT_NAME = "default"


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        """`origin` says where `source` is from. Raises CheckpointError when it does not compile."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin}: line {error.lineno}: the chat template is not valid: {error.message}"
            ) from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """The template of a model folder, or None when it has none.

        chat_template.jinja goes before `chat_template` in tokenizer_config.json, which may be one
        template or a list of named ones, of which the one called "default" counts.

        Raises CheckpointError when a file is broken or the choice is not clear.
        """
        config_path = model_dir / TOKENIZER_CONFIG_FILE
        config = _read_config(config_path)
        special_tokens = _special_tokens(config)
        template_path = model_dir / TEMPLATE_FILE
        if template_path.exists():
            return cls(_read_text(template_path), str(template_path), special_tokens)
        found = config.get("chat_template")
        if found is None:
            return None
        origin = f"{config_path}: chat_template"
        return cls(_choose(found, origin), origin, special_tokens)

    def render(self, turns: Iterable[Mapping[str, str]]) -> str:
        """The conversation as text, ending where the assistant's answer begins.

        `turns` hold "role" and "content". Raises InvalidRequestError when the template refuses
        the conversation.
        """
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[dict(turn) for turn in turns],
                add_generation_prompt=True,
            )
        except Exception as error:  # a template can fail in any way Python can
            raise InvalidRequestError(
                "chat", f"the model's chat template refuses this conversation: {error}"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %}, which marks the assistant's words for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 (the type is jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        """Puts the body in place of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """An environment with the settings, filters and functions that published templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes characters that matter in HTML; a prompt is no HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # local time is what templates mean


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must hold an object, got {type(config).__name__}")
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like; each is a string or an object with its content."""
    found = {}
    for key, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            found[key] = token
    return found


def _choose(found: Any, origin: str) -> str:
    """The template itself, out of one template or a list of named ones."""
    if isinstance(found, str):
        return found
    try:
        by_name = {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{origin}: must be a string or a list of objects with `name` and `template`"
        ) from error
    if _DEFAULT_NAME not in by_name:
        raise CheckpointError(
            f"{origin}: none of the named templates ({', '.join(by_name) or 'there are none'}) is "
            f'called "{_DEFAULT_NAME}"'
        )
    return by_name[_DEFAULT_NAME]
