"""Commands `settings` and `schema`: the settings of a recipe, for people and for editors."""

from __future__ import annotations

from typing import Annotated

import typer

from distill.commands.arguments import AsJson, print_json
from distill.commands.settings_schema import Found, find_settings, json_schema
from distill.commands.settings_schema import settings as all_settings
from distill.core import console


def complete_setting(incomplete: str) -> list[str]:
    paths = [setting.name.replace("[]", ".0") for setting in all_settings()]
    return [path for path in paths if path.startswith(incomplete)]


def settings(
    field: Annotated[
        str | None,
        typer.Argument(
            metavar="FIELD", help="A setting, a prefix, or its name in another tool.", autocompletion=complete_setting
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the settings of a recipe: type, default and description.

    \b
    distill settings                           # list all
    distill settings train.batch_size
    distill settings data.on_policy            # a section
    distill settings num_train_epochs          # its name in another tool
    distill settings seq_kd                    # what has no counterpart, and why
    """
    found = Found(all_settings()) if field is None else find_settings(field)
    matches = found.settings
    if as_json:
        print_json([setting._asdict() for setting in matches] if matches else {"name": field, **found._asdict()})
    elif found.option:
        console.print_lines(f"{field}: the option {found.option} of distill run. {found.text}".rstrip(" ."))
    elif not matches:
        console.print_lines(f"{field}: there is none, because {found.text}")
    elif len(matches) > 12:
        console.show_table(["setting", "default"], [[setting.name, setting.default[:36]] for setting in matches])
        console.print_lines("\ndistill settings FIELD explains one, or a section such as train")
    else:
        for number, setting in enumerate(matches):
            lines = {
                "type": setting.type,
                "default": setting.default,
                "also": ", ".join(f"{name} in {tool}" for tool, name in setting.elsewhere.items()),
            }
            console.print_lines(("\n" if number else "") + setting.name)
            console.print_lines(f"  {setting.meaning}")
            for key, value in lines.items():
                if value:
                    console.print_lines(f"  {key:<11}{value}")
        if found.text:
            console.print_lines(f"\n{field}: {found.text}")


def schema() -> None:
    """Print the JSON schema of recipes, for completion and validation in editors.

    \b
    distill schema > recipe.schema.json
    """
    print_json(json_schema())
