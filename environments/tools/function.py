"""A plain Python function as a tool: its signature is the schema, its docstring the description."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import typing
from typing import TYPE_CHECKING, Any

from environments.errors import ConfigError
from environments.tools.base import Tool, ToolFunction, ToolOutput, first_paragraph

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_ARGS_SECTION = re.compile(r"^Args:\n((?:[ \t].*\n?|\n)+)", re.MULTILINE)
_ARGS_ENTRY = re.compile(r"(?P<name>\w+)(?: *\([^)]*\))?: *(?P<text>.*)", re.DOTALL)


class FunctionTool(Tool):
    """Calls a function with the model's arguments, checked and converted to its type hints.

    The tool is named after the function unless ``name`` is given, and described by the first paragraph of
    the docstring. A parameter is described by its entry in a Google-style ``Args:`` section or by
    ``Annotated[int, "what it means"]``; one with a default is optional. Any hint that pydantic knows will
    do: ``list[str]``, ``Literal``, enums, unions, dataclasses, typed dicts.

    Arguments are converted where nothing is lost, ``"5"`` to 5 for an ``int``. Everything else that does
    not fit, an unknown argument too, is answered by an error that says which argument and why. Each call
    of an async function has an event loop of its own: nothing that is bound to one outlives the call.

    Raises:
        ConfigError: there is no docstring, or a parameter has no type hint, no name, or no schema.
    """

    def __init__(self, function: ToolFunction, name: str | None = None) -> None:
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            raise ConfigError(
                f"{function!r} is no tool: use a function made with 'def', a Tool, an MCPServer, or a name."
            )
        documentation = inspect.getdoc(function) or ""
        description = first_paragraph(documentation)
        if not description:
            raise ConfigError(
                f"The tool function {function.__qualname__!r} has no docstring: write one, the model reads "
                "its first paragraph."
            )
        super().__init__(name or function.__name__, description)
        self._function = function
        self._checked, self._schema = _adapter_of(function, _argument_texts(documentation))

    def __reduce__(self) -> tuple[type[FunctionTool], tuple[ToolFunction, str]]:
        return FunctionTool, (self._function, self.name)  # the receiving process makes pydantic's part again

    def _parameters(self) -> dict[str, Any]:
        return self._schema

    def forward(self, /, **arguments: Any) -> Any:
        from pydantic import ValidationError

        try:
            checked = self._checked.validate_python(arguments)
        except ValidationError as error:
            return ToolOutput(self.name, error=f"wrong arguments for {self.name!r}: {_sentence(error)}.")
        return self._function(**checked)


def _adapter_of(function: ToolFunction, texts: dict[str, str]) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """The pydantic adapter that checks the arguments of ``function``, and their JSON schema."""
    from pydantic import ConfigDict, Field, TypeAdapter
    from pydantic.errors import PydanticUserError

    hints = _type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not named or parameter.name not in hints:
            raise ConfigError(
                f"The parameter '{parameter}' of the tool function {function.__qualname__!r} "
                + ("has no type hint: annotate it." if named else "has no name of its own: give it one.")
            )
        hint = hints[parameter.name]
        is_annotated = typing.get_origin(hint) is typing.Annotated
        notes = [note for note in hint.__metadata__ if isinstance(note, str)] if is_annotated else []
        text = notes[0] if notes else texts.get(parameter.name)
        hints[parameter.name] = typing.Annotated[hint, Field(description=text)]

    checked: Any = functools.wraps(function)(lambda **arguments: arguments)
    checked.__annotations__ = hints
    try:
        adapter = TypeAdapter[Any](checked, config=ConfigDict(extra="forbid"))  # also of what they hold
        return adapter, _json_schema(adapter)
    except PydanticUserError as error:
        raise ConfigError(
            f"A type hint of the tool function {function.__qualname__!r} has no schema: use plain types, "
            f"lists, dicts, Literal, enums or dataclasses. {error.message}"
        ) from error


def _type_hints(function: ToolFunction) -> dict[str, Any]:
    """The hints as types. Hints written as text lose their imports on the way to another process.

    ``from __future__ import annotations`` makes texts of all hints, and cloudpickle sends with a function
    of the main program only the names that its code uses. So names of ``typing`` are found without import.
    """
    names = {**vars(typing), **inspect.unwrap(function).__globals__}
    try:
        return typing.get_type_hints(function, names, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"The type hints of the tool function {function.__qualname__!r} cannot be read here ({error}): "
            "move it into a module that imports this name, or leave out 'from __future__ import annotations'."
        ) from error


def _json_schema(arguments: TypeAdapter[Any]) -> dict[str, Any]:
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        """Leaves out the titles, which repeat the names and only cost the model tokens."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    schema = arguments.json_schema(schema_generator=Untitled)
    return {key: value for key, value in schema.items() if key != "title"}


def _argument_texts(documentation: str) -> dict[str, str]:
    """Read the ``Args:`` section of a docstring: the description of each parameter, by name."""
    section = _ARGS_SECTION.search(documentation)
    entries = re.split(r"^(?=\S)", textwrap.dedent(section[1]), flags=re.MULTILINE) if section else []
    matches = [match for match in map(_ARGS_ENTRY.match, entries) if match]
    return {match["name"]: " ".join(match["text"].split()) for match in matches}


def _sentence(error: ValidationError) -> str:
    """Pydantic's errors as a sentence for the model: ``b: Input should be a valid integer``."""
    found = error.errors(include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in found)
