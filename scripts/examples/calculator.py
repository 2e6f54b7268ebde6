"""Environment of rollouts in which a student may use a calculator: one function that replies to its messages.

data:
  source: ./questions.jsonl
  on_policy: {environment: scripts/examples/calculator.py:step, max_new_tokens: 256, max_turns: 4}

distill run my-recipe.yaml --plugin scripts/examples/calculator.py
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def step(messages: Sequence[Mapping[str, str]], tools: object, row: Mapping[str, object]) -> dict[str, str] | None:
    """Return the calculator's result for `<calc>2 * (3 + 4)</calc>` in the last message; None where there is none.

    Args:
        messages: the conversation, with the student's response at its end.
        tools: JSON schemas of the tools that the row declares; None for none.
        row: all columns of the data's row.
    """
    found = re.search(r"<calc>(.*?)</calc>", messages[-1]["content"], re.DOTALL)
    if found is None:
        return None
    try:
        result = f"{value_of(ast.parse(found[1].strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        result = f"error: {error}"
    return {"role": "tool", "content": result}


def value_of(node: ast.AST) -> float:
    """Return the value of an expression of numbers, + - * / and brackets."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value_of(left), value_of(right))
    raise ValueError("expected numbers, + - * / and brackets")
