"""Jinja templates of a teacher's context (`teacher.context.syntax: jinja`): what they name, and their text.

A template runs in Jinja's sandbox. It reads the row's columns (`row.solution`), the student's prompt (`prompt`, the
text of its last user message; `messages`, all of them) and, of a student-generated response, what the run knows of its
prompt: `best` and `failed`, other responses to it, `rollouts`, all others, its own `reward` and the `feedback` on it.
What a response lacks is undefined: `{% if best %}` is false, and writing `{{ best.answer }}` makes the whole text
empty, that is, no context.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Template

ROW = "row"
OF_THE_ROW = (ROW, "prompt", "messages")
OTHERS = ("best", "failed", "rollouts")  # responses to the same prompt
OF_THE_RUN = (*OTHERS, "reward", "feedback")


class TemplateNames(NamedTuple):
    """What a template reads.

    Attributes:
        columns: Columns of the row, in the order in which the template first names them.
        of_the_run: Names of `OF_THE_RUN`, in that order.
    """

    columns: tuple[str, ...]
    of_the_run: tuple[str, ...]


class WholeResponseError(ValueError):
    """A template writes a response, which has fields, and not one of its fields."""


class Response(dict[str, Any]):
    """A response as templates read it, with `answer`, `messages`, `reward` and `feedback`, where it has them.

    Its text, also within a list's, is refused: a teacher would read that of a Python dict.
    """

    def __repr__(self) -> str:
        raise WholeResponseError("expected a field of a response, such as best.answer, to be written, got all of it")

    __str__ = __repr__


@functools.lru_cache(maxsize=64)
def names_of(source: str) -> TemplateNames:
    """Return what a template reads.

    Raises:
        ValueError: It is not valid Jinja, reads something else, or writes a whole response.
    """
    from jinja2 import TemplateSyntaxError, nodes  # most recipes have no such template
    from jinja2.meta import find_undeclared_variables

    environment = _environment()
    try:
        tree = environment.parse(source)
        environment.compile(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"expected a Jinja template, got in line {error.lineno}: {error.message}") from None
    known = (*OF_THE_ROW, *OF_THE_RUN)
    read = find_undeclared_variables(tree)
    unknown = sorted(read.difference(known, environment.globals))
    if unknown:
        raise ValueError(f"expected {', '.join(known)} in a Jinja template, got {unknown[0]}; a column is row.NAME")
    columns: dict[str, None] = {}
    named = 0
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if not (isinstance(node.node, nodes.Name) and node.node.name == ROW):
            continue
        column = node.attr if isinstance(node, nodes.Getattr) else None
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            column = node.arg.value
        if isinstance(node, nodes.Getattr) and hasattr(dict, node.attr):  # Jinja would take the method
            raise ValueError(f'expected row["{node.attr}"], got row.{node.attr}, which is no column in Jinja')
        if isinstance(column, str):
            columns[column] = None
            named += 1
    # Which columns only the teacher reads has to be known before the rows are read.
    if sum(node.name == ROW for node in tree.find_all(nodes.Name)) > named:
        raise ValueError('expected columns by name, row.NAME or row["NAME"], got row in another use')
    _refuse_whole_responses(source, columns)
    return TemplateNames(tuple(columns), tuple(name for name in OF_THE_RUN if name in read))


def _refuse_whole_responses(source: str, columns: Iterable[str]) -> None:
    """Raise WholeResponseError where a template writes a whole response, so far as values of no row can tell."""
    text = "1"  # also where a number is wanted
    response = Response(answer=text, messages=[], reward=1.0, feedback=text)
    variables = {
        ROW: dict.fromkeys(columns, text),
        "prompt": text,
        "messages": [],
        "best": response,
        "failed": response,
        "rollouts": [response, response],
        "reward": 1.0,
        "feedback": text,
    }
    try:
        _compiled(source).render(variables)
    except WholeResponseError:
        raise
    except Exception:  # these values are not what the template is made for; with a row's `render` raises
        return


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return a template's text, without white space around it; empty where it writes what `variables` lack.

    Args:
        variables: Values by name; a column of the row that is None counts as absent.
    """
    from jinja2 import UndefinedError

    row = {name: value for name, value in variables.get(ROW, {}).items() if value is not None}
    try:
        return _compiled(source).render({**variables, ROW: row}).strip()
    except UndefinedError:
        return ""
    except WholeResponseError as error:
        raise ValueError(f"teacher.context.template: {error}") from None
    except Exception as error:  # a template is a program, and may raise anything
        raise ValueError(f"teacher.context.template: {type(error).__name__}: {error}") from None


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> Any:
    from jinja2 import Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Lacking(Undefined):
        """A value that is not there: false in a condition, and an error where it is written."""

        __str__ = Undefined._fail_with_undefined_error

    # the options with which transformers compiles chat templates
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=Lacking)
