"""The tool calls of a streamed answer, sent while they grow."""

from __future__ import annotations

import json
import uuid

from environments.tools.base import MODEL_JSON
from policies.agents.parsers import ToolParser
from policies.agents.parsers.base import Block, Json, valid
from policies.model_api.growing_text import num_held


class GrowingCalls:
    """Sorts an answer that comes in pieces into text and calls, in the form of OpenAI's deltas.

    A call's name is sent first, then its arguments as they grow; a call whose form does not show where these
    begin is sent when it is complete. Text is sent at once, but for what may be the beginning of a call, and
    for white space, which is left out around calls. A call that breaks off has been sent as far as it went.
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._text = ""
        """Text that is not sent yet; it begins with a block of calls if ``_in_block``."""
        self._in_block = False
        self._space = ""
        """White space that has not been followed by a text yet."""
        self._has_text = False
        """Text since the beginning, or since the last call."""
        self._arguments: GrowingJson | None = None
        """Length of the call at the beginning of ``_text``."""
        self._num_read = 0
        """The characters of ``_text`` that these have read."""
        self._num_calls = 0
        self.num_complete = 0
        """Calls that have been sent to their end."""

    def add(self, piece: str, is_last: bool) -> Json:
        """The ``content`` and ``tool_calls`` that this piece of the answer makes certain."""
        self._text += piece
        content = ""
        calls: dict[int, Json] = {}
        while True:
            if not self._in_block:
                content += self._text_before_block(is_last)
            if not self._in_block:
                break
            self._grow(calls)
            block = self._complete_block(piece, is_last)
            if block is None:
                break
            self._finish(block, calls)
        if is_last:
            content += self._rest(calls)
        delta: Json = {"tool_calls": list(calls.values())} if calls else {}
        return delta if calls and not content else {"content": content, **delta}

    def _text_before_block(self, is_last: bool) -> str:
        """The text before the next block, as far as it is certain."""
        start = self._start_of_block()
        end = start
        if start is None:
            end = len(self._text) - (0 if is_last else num_held(self._text, self._parser.openings))
        text = self._space + self._text[:end]
        self._text = self._text[end:]
        self._in_block = start is not None
        kept = text.rstrip()
        self._space = "" if self._in_block else text[len(kept) :]
        self._has_text = self._has_text or bool(kept)
        return kept

    def _start_of_block(self) -> int | None:
        first = self._text.lstrip()
        if not self._has_text and self._parser.opens_answer and first.startswith(self._parser.opens_answer):
            return len(self._text) - len(first)
        found = (self._text.find(mark) for mark in self._parser.openings)
        return min((start for start in found if start >= 0), default=None)

    def _grow(self, calls: dict[int, Json]) -> None:
        """Send what the first call of the block has got."""
        if self._arguments is None:
            begun = self._parser.begun(self._text)
            if begun is None:
                return
            name, self._num_read = begun
            self._arguments = GrowingJson()
            self._begin(name, "", calls)
        index = self._num_calls - 1
        more = self._arguments.add(self._text[self._num_read :])
        self._num_read = len(self._text)
        if more:
            call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            call["function"]["arguments"] += more

    def _begin(self, name: str, arguments: str, calls: dict[int, Json]) -> None:
        calls[self._num_calls] = {
            "index": self._num_calls,
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._num_calls += 1

    def _complete_block(self, piece: str, is_last: bool) -> Block | None:
        """The block with which the text begins, once it has been read to its end and nothing changes it."""
        if self._arguments is not None and not self._arguments.has_ended:
            return None
        if self._parser.is_closed and not is_last and not any(mark in piece for mark in ">}]"):
            return None  # the text was looked through with the piece before
        block = next(self._parser.blocks(self._text), None)
        if block is None or len(valid(block.calls)) < len(block.calls):
            return None
        return block if self._parser.is_closed or is_last or block.end < len(self._text) else None

    def _finish(self, block: Block, calls: dict[int, Json]) -> None:
        begun = 0 if self._arguments is None else 1
        for call in block.calls[begun:]:
            self._begin(call.name, json.dumps(call.arguments), calls)
        self.num_complete += len(block.calls)
        self._text = self._text[block.end :]
        self._in_block, self._has_text, self._arguments = False, False, None

    def _rest(self, calls: dict[int, Json]) -> str:
        """Rest at the end: a malformed or unfinished call stays text, unless it was begun."""
        if self._arguments is not None:
            self.num_complete += self._arguments.has_ended
            block = next(self._parser.blocks(self._text), None)
            self._text = "" if block is None else self._text[block.end :]
        text, good = self._parser.split(self._text)
        for call in good:
            self._begin(call.name, json.dumps(call.arguments), calls)
        self.num_complete += len(good)
        text = self._space + text
        return text.strip() if self._num_calls else text


class GrowingJson:
    """The text of a JSON object that comes in pieces, as JSON has it: line breaks in strings are escaped.

    Numbers are held back until they are complete. After one that JSON has not, nothing more comes.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._is_broken = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._word = ""
        """A number or a name, outside of strings."""

    def add(self, text: str) -> str:
        """The text that this piece makes certain. What follows the object is left out."""
        return "".join(map(self._added, text))

    def _added(self, char: str) -> str:
        if self.has_ended or self._is_broken:
            return ""
        if self._in_string:
            if self._is_escaped or char == "\\":
                self._is_escaped = not self._is_escaped
            elif char == '"':
                self._in_string = False
            return json.dumps(char)[1:-1] if char < " " else char
        if char not in '{}[],:" \t\r\n':
            self._word += char
            return ""
        word, self._word = self._word, ""
        if word:
            try:
                MODEL_JSON.decode(word)
            except ValueError:
                self._is_broken = True
                return ""
        self._depth += (char in "{[") - (char in "}]")
        self._in_string = char == '"'
        self.has_ended = self._depth == 0
        return word + char
