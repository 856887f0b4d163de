"""DeepSeek's calls, marked by tokens of their own."""

# ruff: noqa: RUF001  (DeepSeek writes its marks with a fullwidth bar)

from __future__ import annotations

import re
from collections.abc import Iterator

from environments.tools import ToolCall
from policies.agents.parsers.base import Block, BlockParser, checked, invalid, read_json, unread

CLOSE = "<｜tool▁call▁end｜>"

PROMPT = """\
## Tools

You may call the functions below, each described by a JSON schema:
{schemas}

To call functions, end your answer with one block of calls, and write each call exactly like this:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜><function-name>
```json
<args-json-object>
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""


class DeepSeekParser(BlockParser):
    """DeepSeek V3, R1 and its distills: a name and, fenced as JSON, the arguments.

    Also V3.1, which writes the name, the separator and the bare arguments.
    """

    prompt = PROMPT
    openings = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")
    _BLOCK = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>|<｜tool▁calls▁(?:begin|end)｜>")
    _HEAD = re.compile(
        r"\s*+(?:function<｜tool▁sep｜>(?P<fenced>[^\n]+)\n\s*```json\s|(?P<bare>[^\n<]+)<｜tool▁sep｜>(?=\s*[{<]))"
    )
    beginning = re.compile(rf"(?:{_BLOCK.pattern}){_HEAD.pattern}\s*(?=\{{)")
    _END = re.compile(r"\s*+(?P<fence>```)?\s*+<｜tool▁call▁end｜>")

    def blocks(self, text: str) -> Iterator[Block]:
        position = 0
        while (begin := self._BLOCK.search(text, position)) is not None:
            if begin[0] == "<｜tool▁calls▁end｜>":
                position = begin.end()
                yield Block(begin.start(), position, [])
                continue
            call, position = self._read(text, begin)
            yield Block(begin.start(), position, [call])

    def around_arguments(self, name: str) -> tuple[str, str]:
        begin = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        return begin, "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

    def _read(self, text: str, begin: re.Match[str]) -> tuple[ToolCall, int]:
        """A call and the position after it."""
        position = begin.end()
        if not begin[0].endswith("<｜tool▁call▁begin｜>"):
            return invalid("The block of tool calls has no <｜tool▁call▁begin｜>."), position
        head = self._HEAD.match(text, position)
        if head is None:
            return unread(
                text,
                position,
                CLOSE,
                "The tool call has to be function<｜tool▁sep｜>, the name, and in the lines below it the "
                "arguments between ```json and ```.",
            )
        position, arguments = head.end(), None
        try:
            if self._END.match(text, position) is None:
                arguments, position = read_json(text, position)
        except ValueError as error:
            fault = f"The arguments of the tool call are not valid JSON ({error})."
            return unread(text, position, CLOSE, fault)
        end = self._END.match(text, position)
        if end is None or (end["fence"] is None) != (head["fenced"] is None):
            call, _ = unread(text, position, CLOSE, "The arguments are followed by something else.")
            return call, position
        name = head["fenced"] or head["bare"]
        return checked(name.strip(), arguments), end.end()
