"""`headwater chat`: a conversation in the terminal.

Ctrl-C ends the answer, not the program; Ctrl-D or /quit ends the program; /new starts afresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession

from headwater.cli.sampling import sampling_from
from headwater.client import Client
from headwater.errors import HeadwaterError
from headwater.rpc.link import Link

if TYPE_CHECKING:
    import argparse

    from headwater.config import Config
    from headwater.generation import SamplingParams, TextEvent

_BAR_CHARS = 30


def chat(arguments: argparse.Namespace, config: Config) -> int:
    """Talks until the user leaves."""
    asyncio.run(_converse(config, arguments.system, sampling_from(arguments)))
    return 0


async def _converse(config: Config, system: str | None, sampling: SamplingParams) -> None:
    opening = [("system", system)] if system else []
    messages = list(opening)
    print("Ctrl-C ends an answer, /new starts afresh, Ctrl-D or /quit leaves.")
    ask = _asker()
    async with Client(config.router.listen, Link.of(config)) as client:
        while (text := await ask()) is not None:
            if text == "/new":
                messages = list(opening)
            elif text:
                messages.append(("user", text))
                messages.append(("assistant", await _answer(client, messages, sampling)))


def _asker() -> _Asker:
    return _Asker(PromptSession() if sys.stdin.isatty() else None)


class _Asker:
    """Reads a line, with editing and history on a terminal; None at the end."""

    def __init__(self, session: PromptSession[str] | None) -> None:
        self._session = session

    async def __call__(self) -> str | None:
        try:
            if self._session is not None:
                text = await self._session.prompt_async("> ")
            else:
                text = await asyncio.to_thread(sys.stdin.readline)
                if not text:
                    return None
        except EOFError:
            return None
        except KeyboardInterrupt:
            return ""
        text = text.strip()
        return None if text == "/quit" else text


async def _answer(client: Client, messages: list[tuple[str, str]], sampling: SamplingParams) -> str:
    """Streams one answer; what was said before Ctrl-C or an error stays in the conversation."""
    pieces: list[str] = []
    task = asyncio.ensure_future(_stream(client, messages, sampling, pieces))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        print(" [cancelled]")
    except HeadwaterError as error:
        print(f"\n[{error}]")
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return "".join(pieces)


async def _stream(
    client: Client, messages: list[tuple[str, str]], sampling: SamplingParams, pieces: list[str]
) -> None:
    async with contextlib.aclosing(client.chat(messages, sampling)) as events:
        async for event in events:
            _show_progress(event)
            pieces.append(event.text)
            print(event.text, end="", flush=True)
    print()


def _show_progress(event: TextEvent) -> None:
    """A bar while the prompt is computed, gone before the first token; only on a terminal."""
    if event.prefill_progress is None or not sys.stdout.isatty():
        return
    share = event.prefill_progress
    if share >= 1.0:
        print("\r\033[2K", end="", flush=True)
        return
    bar = "━" * round(_BAR_CHARS * share)
    print(f"\r\033[2Kreading the prompt {bar:<{_BAR_CHARS}} {share:.0%}", end="", flush=True)
